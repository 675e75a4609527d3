"""Log-probabilities, ranks and likeliest tokens are those of a float64 log-softmax over the same logits."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from slow_sampling import log_softmax

from headrace.ops.cpu.logprobs import logprobs

VOCAB = 12
rows = st.lists(st.sampled_from([-3.0, 0.0, 0.5, 2.0]) | st.floats(-40, 40, width=32), min_size=VOCAB, max_size=VOCAB)


@given(st.lists(st.tuples(rows, st.integers(0, VOCAB - 1), st.integers(0, VOCAB)), max_size=5))
def test_each_position_is_what_float64_says(cases: list[tuple[list[float], int, int]]) -> None:
    logits_SV = torch.tensor([logits for logits, *_ in cases]).reshape(-1, VOCAB)
    found = logprobs(logits_SV, [token for _, token, _ in cases], [count for *_, count in cases])
    assert len(found) == len(cases)
    for (logits, token, count), each in zip(cases, found, strict=True):
        exact = log_softmax(logits)
        assert each.logprob == pytest.approx(exact[token], abs=1e-4)
        assert each.rank == 1 + sum(other > logits[token] for other in logits)
        best = sorted(range(VOCAB), key=lambda token: (-logits[token], token))[:count]
        assert [token for token, _ in each.top] == best
        assert [value for _, value in each.top] == pytest.approx([exact[token] for token in best], abs=1e-4)


def test_reduced_precision_is_widened_before_anything_is_summed() -> None:
    logits_SV = torch.randn(1, 5000, generator=torch.Generator().manual_seed(0)).bfloat16()
    exact = log_softmax(logits_SV[0].tolist())
    assert logprobs(logits_SV, [7], [0])[0].logprob == pytest.approx(exact[7], abs=1e-5)


@pytest.mark.parametrize("broken", [math.nan, math.inf, -math.inf])
def test_broken_rows_raise_and_warn_nothing_and_their_neighbours_are_right(broken: float) -> None:
    found = logprobs(torch.tensor([[broken] * 4, [0.0] * 4]), [1, 1], [2, 2])
    assert found[1].logprob == pytest.approx(math.log(1 / 4)) and found[1].rank == 1


def test_the_logits_are_left_as_they_are() -> None:
    logits_SV = torch.arange(6.0)[None]
    logprobs(logits_SV, [0], [3])
    assert logits_SV.tolist() == [[0, 1, 2, 3, 4, 5]]
