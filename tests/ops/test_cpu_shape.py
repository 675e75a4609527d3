"""Shaped logits are what a slow account of every option and transformers' processors make of them, step after step."""

from __future__ import annotations

import math
from dataclasses import asdict
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from slow_sampling import shaped
from transformers import (
    LogitsProcessor,
    MinLengthLogitsProcessor,
    NoBadWordsLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    SuppressTokensLogitsProcessor,
)

from headrace.engine.scheduling.shaping import Shaping
from headrace.ops.cpu import shape as cpu_shape
from headrace.ops.cpu.shape import Shaper

VOCAB = 8
tokens = st.integers(0, VOCAB - 1)
some = st.lists(tokens, max_size=4, unique=True).map(tuple)
penalties = st.sampled_from([-2.0, -0.5, 0.0, 0.3, 2.0])
shapings = st.builds(
    Shaping,
    bias=st.dictionaries(tokens, st.sampled_from([-100.0, -1.5, 0.0, 3.0, 100.0]), max_size=4).map(
        lambda pairs: tuple(pairs.items())
    ),
    repetition_penalty=st.sampled_from([0.01, 0.7, 1.0, 1.3, 100.0]),
    frequency_penalty=penalties,
    presence_penalty=penalties,
    allowed=st.none() | st.lists(tokens, min_size=1, unique=True).map(tuple),
    forbidden=some,
    min_length=st.integers(0, 12),
    stops=some,
    bad_words=st.lists(st.lists(tokens, min_size=2, max_size=4).map(tuple), max_size=4).map(tuple),
)
logits = st.lists(st.floats(-30, 30, width=32), min_size=VOCAB, max_size=VOCAB)


def shaper(asked: Shaping, known: list[int], prompt_len: int, vocab_size: int = VOCAB) -> Shaper:
    return Shaper(tokens=known, prompt_len=prompt_len, vocab_size=vocab_size, **asdict(asked))


def shape(made: Shaper, values: list[float], known: list[int]) -> list[float]:
    array = np.array(values, np.float32)
    left = made.shape(array, np.array(known))
    assert left is bool(array.max() > -math.inf)
    found: list[float] = array.tolist()
    return found


def close(values: list[float]) -> Any:
    return pytest.approx(values, rel=1e-4, abs=1e-4)


@given(shapings, st.lists(tokens, min_size=1, max_size=6), st.lists(tokens, max_size=6), st.data())
def test_every_step_is_what_the_slow_account_says_wherever_a_row_begins(
    asked: Shaping, prompt: list[int], completion: list[int], data: st.DataObject
) -> None:
    """The counts grow with the tokens, and a row that begins again, after a preemption, counts the same."""
    resumed = data.draw(st.integers(0, len(completion)))
    known = prompt + completion[:resumed]
    made = shaper(asked, known, len(prompt))
    for token in [*completion[resumed:], None]:
        values = data.draw(logits)
        assert shape(made, values, known) == close(shaped(values, known, len(prompt), asked))
        if token is not None:
            made.append(token)
            known = [*known, token]


@given(logits, st.lists(tokens, min_size=3, max_size=6), st.sampled_from([0.5, 1.0, 1.7]))
def test_transformers_processors_agree(values: list[float], known: list[int], penalty: float) -> None:
    words = ((known[-1], 2), (known[-2], known[-1], 3), (5, 6, 7))
    bias, stops, forbidden = ((1, 2.5), (4, -3.0)), (0, 4), (6,)
    processors: list[LogitsProcessor] = [
        SequenceBiasLogitsProcessor({(token,): value for token, value in bias}),
        RepetitionPenaltyLogitsProcessor(penalty),
        NoBadWordsLogitsProcessor([list(word) for word in words]),
        MinLengthLogitsProcessor(len(known) + 1, list(stops)),
        SuppressTokensLogitsProcessor(list(forbidden), device="cpu"),
    ]
    scores = torch.tensor([values])
    for processor in processors:
        scores = processor(torch.tensor([known]), scores)
    asked = Shaping(
        bias=bias,
        repetition_penalty=penalty,
        forbidden=forbidden,
        min_length=len(known) + 1,
        stops=stops,
        bad_words=words,
    )
    assert shape(shaper(asked, known, 1), values, known) == close(scores[0].tolist())


def test_the_prompt_counts_for_repetition_alone() -> None:
    asked = Shaping(repetition_penalty=2.0, frequency_penalty=1.0, presence_penalty=0.5)
    made = shaper(asked, [3, 3, 4], 3)
    assert shape(made, [4.0] * VOCAB, [3, 3, 4]) == [4.0, 4.0, 4.0, 2.0, 2.0, 4.0, 4.0, 4.0]
    for _ in range(2):
        made.append(4)
    assert shape(made, [4.0] * VOCAB, [3, 3, 4, 4, 4]) == [4.0, 4.0, 4.0, 2.0, -0.5, 4.0, 4.0, 4.0]


def test_counts_grow_past_what_was_laid_out_for_them() -> None:
    known = list(range(50)) + [7] * 3
    asked = Shaping(frequency_penalty=0.25, presence_penalty=1.0)
    made = shaper(asked, known, 50, vocab_size=400)
    for token in range(20, 300):
        made.append(token)
        known.append(token)
    assert shape(made, [0.0] * 400, known) == close(shaped([0.0] * 400, known, 50, asked))


@pytest.mark.parametrize("broken", [math.nan, math.inf])
def test_a_broken_row_stays_broken_for_sampling_to_tell(broken: float) -> None:
    values = np.array([0.0, broken, 1.0, 0, 0, 0, 0, 0], np.float32)
    assert shaper(Shaping(forbidden=(1,)), [0], 1).shape(values, np.array([0]))
    assert not math.isfinite(values.max())


def test_logits_that_a_penalty_makes_infinite_warn_nobody() -> None:
    values = np.array([3e38, 1.0, 0, 0, 0, 0, 0, 0], np.float32)
    assert shaper(Shaping(repetition_penalty=0.01), [0], 1).shape(values, np.array([0]))
    assert values[0] == math.inf


def test_masks_that_leave_nothing_are_told() -> None:
    assert not shaper(Shaping(allowed=(2,), bad_words=((5, 2),)), [5], 1).shape(
        np.zeros(VOCAB, np.float32), np.array([5])
    )


def test_a_long_prompt_is_counted_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(cpu_shape._Penalties, "add")  # which takes one token
    known = [3, 5, 3, *range(1000, 9000), 5, 5, 3, 7]
    made = shaper(Shaping(frequency_penalty=0.5), known, len(known) - 4, 9000)
    found = shape(made, [1.0] * 9000, known)
    assert {token: value for token, value in enumerate(found) if value != 1.0} == {3: 0.5, 5: 0.0, 7: 0.5}
