"""Sampling agrees with a slow float64 account of it, and its noise depends on (seed, position) and on nothing else."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import assume, example, given
from hypothesis import strategies as st

from headrace.ops.cpu.noise import gumbel as noise
from headrace.ops.cpu.noise import words, words_of
from headrace.ops.cpu.sample import Choosing, sample, sample_drafts

INF, NAN = math.inf, math.nan
GREEDY = Choosing(0.0, 0, 1.0, 0.0, 0, 0)
NEAR = 1e-5
"""Relative distance within which float32 may fall on either side of a bound."""


def choosing(
    temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0, seed: int = 0, position: int = 0
) -> Choosing:
    return Choosing(temperature, top_k, top_p, min_p, seed, position)


def one(logits: Sequence[float], row: Choosing) -> int:
    return sample(torch.tensor([logits]), [row])[0]


def philox(counter: Sequence[int], key: Sequence[int]) -> list[int]:
    """Philox 4x32-7 on four words and a key of two, as its authors describe it."""
    (a, b, c, d), (low, high) = counter, key
    for _ in range(7):
        first, second = 0xD2511F53 * a, 0xCD9E8D57 * c
        a, b, c, d = (second >> 32) ^ b ^ low, second & (2**32 - 1), (first >> 32) ^ d ^ high, first & (2**32 - 1)
        low, high = (low + 0x9E3779B9) % 2**32, (high + 0xBB67AE85) % 2**32
    return [a, b, c, d]


def uniform(seed: int, position: int, token: int = 0) -> float:
    key = [seed % 2**32, (seed >> 32) % 2**32]
    word = philox([token // 4096 * 1024 + token % 1024, position % 2**32, 0, 0], key)[token // 1024 % 4]
    return (word + 0.5) / 2**32


def gumbel(row: Choosing, token: int) -> float:
    return -math.log(-math.log1p(-uniform(row.seed, row.position, token)))


# -- what is kept and what is chosen ----------------------------------------------------------------------------------


def probabilities(logits: Sequence[float], temperature: float) -> list[float]:
    most = max(logits)
    weights = [math.exp((value - most) / temperature) for value in logits]
    return [weight / sum(weights) for weight in weights]


def kept(logits: Sequence[float], row: Choosing, slack: float) -> set[int]:
    """Tokens that may be chosen; `slack` scales top-p and min-p, to find out whether a token lies on their bound."""
    probs = probabilities(logits, row.temperature)
    tokens = set(range(len(logits)))
    if 0 < row.top_k < len(logits):
        kth = sorted(logits, reverse=True)[row.top_k - 1]
        tokens = {token for token in tokens if logits[token] >= kth}
    if row.top_p < 1.0:
        total, so_far = sum(probs[token] for token in tokens), 0.0
        for token in sorted(tokens, key=lambda token: -probs[token]):
            so_far += probs[token]
            if so_far >= row.top_p * slack * total:
                tokens = {other for other in tokens if probs[other] >= probs[token]}
                break
    return {token for token in tokens if probs[token] >= row.min_p * slack * max(probs)}


def expected(logits: Sequence[float], row: Choosing, tokens: set[int]) -> set[int]:
    """The largest logit with its noise, and those so near that float32 may take them for it."""
    most = max(logits)
    scores = {token: (logits[token] - most) / row.temperature + gumbel(row, token) for token in tokens}
    best = max(scores.values())
    return {token for token, score in scores.items() if score >= best - 100 * NEAR}


# Few distinct values make ties; float32 values, as the logits are.
few = st.lists(st.sampled_from([-8.0, -1.0, 0.0, 0.5, 2.0, 2.5]), min_size=1, max_size=24)
many = st.lists(st.floats(-30, 30, width=32).filter(lambda value: value == 0 or abs(value) > 1e-3), min_size=1)
rows = st.builds(
    choosing,
    temperature=st.sampled_from([0.25, 0.7, 1.0, 1.5, 20.0]) | st.floats(0.05, 50),
    top_k=st.integers(0, 30),
    top_p=st.sampled_from([1.0, 0.5, 1e-9]) | st.floats(0.01, 1.0),
    min_p=st.sampled_from([0.0, 1.0]) | st.floats(0.0, 1.0),
    seed=st.integers(-(2**63), 2**63 - 1),
    position=st.integers(0, 2**40),
)


@given(few | many, rows)
@example([0.0], choosing(top_k=1, top_p=0.5, min_p=1.0))
@example([1.0, 1.0, 1.0, 0.0], choosing(top_k=2))  # the third of equals stays with the second
@example([0.0, 1.0, 1.0, 1.0], choosing(top_p=0.3))
def test_the_token_is_the_one_that_float64_chooses_from_the_kept_ones(logits: list[float], row: Choosing) -> None:
    tokens = kept(logits, row, 1.0)
    assume(tokens == kept(logits, row, 1 - NEAR) == kept(logits, row, 1 + NEAR))
    assume(row.top_p == 1.0 or not ties_reach_past(logits, row.top_k))
    assert one(logits, row) in expected(logits, row, tokens)


def ties_reach_past(logits: list[float], top_k: int) -> bool:
    ordered = sorted(logits, reverse=True)
    return 0 < top_k < len(ordered) and ordered[top_k - 1] == ordered[top_k]


def test_top_p_counts_all_that_top_k_leaves() -> None:
    row = choosing(temperature=0.7, top_k=2, top_p=0.5)
    assert {one([2.0, 2.5, 2.0, 2.0], row._replace(seed=seed)) for seed in range(100)} == {0, 1, 2, 3}


@pytest.mark.parametrize("top_k", [0, 700, 900, 5000])
@pytest.mark.parametrize("top_p", [0.9, 0.999])
def test_large_kept_sets_are_found_as_small_ones_are(top_k: int, top_p: float) -> None:
    """Sets of more tokens than are sorted at first."""
    generator = torch.Generator().manual_seed(top_k)
    logits = torch.randn(5000, generator=generator).mul(0.5).tolist()
    row = choosing(top_k=top_k, top_p=top_p)
    tokens = kept(logits, row, 1.0)
    assert len(tokens) > 512
    for seed in range(12):
        assert one(logits, row._replace(seed=seed)) in expected(logits, row._replace(seed=seed), tokens)


def test_every_kept_token_is_chosen_at_some_time_and_no_other_ever() -> None:
    logits = [3.0, 1.0, 2.0, 2.0, -1.0, 1.0]
    for row, tokens in [
        (choosing(), {0, 1, 2, 3, 4, 5}),
        (choosing(top_k=1), {0}),
        (choosing(top_k=2), {0, 2, 3}),
        (choosing(top_k=4, min_p=0.2), {0, 2, 3}),
        (choosing(top_p=0.49), {0}),
        (choosing(top_p=0.5), {0, 2, 3}),
        (choosing(top_k=3, top_p=0.55), {0}),  # top-p counts what top-k leaves: 0.576 of it is token 0
        (choosing(min_p=0.1), {0, 1, 2, 3, 5}),
    ]:
        assert {one(logits, row._replace(seed=seed)) for seed in range(600)} == tokens, row


@given(few, st.sampled_from([1e-45, 1e-300, 1e-7, 1e-3]), st.integers(0, 50))
def test_the_coldest_temperatures_choose_among_the_largest(logits: list[float], temperature: float, seed: int) -> None:
    assert logits[one(logits, choosing(temperature, seed=seed))] == max(logits)


@pytest.mark.parametrize("temperature", [1e6, 1e30, 1e45, 1.7e308])
def test_the_hottest_temperatures_choose_evenly(temperature: float) -> None:
    counts = Counter(one([30.0, -30.0, 0.0, 8.0], choosing(temperature, seed=seed)) for seed in range(2000))
    assert chi_square(counts, [0.25] * 4) < BOUND


@pytest.mark.parametrize("logits", [[3e38, -3e38, 0.0], [-INF, 1.0, -INF], [65504.0, 65503.0, -65504.0]])
@pytest.mark.parametrize("temperature", [1e-45, 1.0, 1e6])
@pytest.mark.parametrize("limits", [{}, {"top_k": 2}, {"top_p": 0.9}, {"min_p": 0.5}], ids=str)
def test_the_largest_finite_logits_and_masked_ones_are_no_trouble(
    logits: list[float], temperature: float, limits: dict[str, float]
) -> None:
    for seed in range(20):
        token = one(logits, choosing(temperature, seed=seed, **limits))  # type: ignore[arg-type]
        assert 0 <= token < len(logits) and logits[token] > -INF


# -- greedy and broken rows -------------------------------------------------------------------------------------------


@given(st.lists(few, min_size=1, max_size=5))
def test_greedy_takes_the_first_of_the_largest(rows_of_logits: list[list[float]]) -> None:
    width = max(map(len, rows_of_logits))
    padded = [logits + [-99.0] * (width - len(logits)) for logits in rows_of_logits]
    found = sample(torch.tensor(padded), [GREEDY] * len(padded))
    assert found == [logits.index(max(logits)) for logits in padded]


@pytest.mark.parametrize("broken", [[NAN, 0.0, 1.0], [NAN] * 3, [0.0, INF, 1.0], [-INF] * 3, [-INF, NAN, INF]])
@pytest.mark.parametrize("row", [GREEDY, choosing(), choosing(top_k=2, top_p=0.5, min_p=0.1)], ids=["0", "1", "limits"])
def test_a_broken_row_is_told_and_its_neighbours_are_not_touched(broken: list[float], row: Choosing) -> None:
    healthy = [0.0, 5.0, 5.5]
    alone = [one(healthy, row._replace(seed=seed)) for seed in (0, 2)]
    seeded = [row._replace(seed=seed) for seed in (0, 1, 2)]
    assert sample(torch.tensor([healthy, broken, healthy]), seeded) == [alone[0], -1, alone[1]]


# -- noise ------------------------------------------------------------------------------------------------------------


def test_random_words_are_those_of_philox_with_seed_and_position() -> None:
    """The slow one gives the numbers that its authors publish; ids come in blocks of four quarters."""
    pi = [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344], [0xA4093822, 0x299F31D0]
    assert philox(*pi) == [0x4DFCCABA, 0x190A87F0, 0xC47362BA, 0xB6B5242A]
    assert philox([0] * 4, [0] * 2) == [0x5F6FB709, 0x0D893F64, 0x4F121F81, 0x4F730A48]
    for seed, position, count in [(0, 0, 9000), (-1, 77, 5000), (2**62 + 12345, 2**31, 4096), (-(2**63), 1, 10)]:
        found = words(seed, position, count)
        for token in {0, 1, 9, 1023, 1024, 3071, 4095, 4096, 8999} & set(range(count)):
            assert found[token] + 0.5 == uniform(seed, position, token) * 2**32, (seed, token)
        some = np.arange(0, count, 7)
        assert (words_of(seed, position, some) == found[some]).all()


def test_noise_is_that_of_float64_and_falls_as_words_rise() -> None:
    steps = [np.arange(2000), np.geomspace(1, 2**32 - 1, 4000).astype(np.int64), 2**32 - 1 - np.arange(2000)]
    drawn = np.unique(np.concatenate(steps)).astype(np.uint32)
    exact = -np.log(-np.log1p(-(drawn.astype(np.float64) + 0.5) / 2**32))
    found = noise(drawn)
    assert np.isfinite(found).all() and (np.diff(found) <= 1e-6).all()
    few = drawn < 2**32 * 0.999  # beyond, float32 has no room left, where noise is so small that it never wins
    assert np.abs(found - exact)[few].max() < 5e-5 and found.max() - found.min() < 26


BOUND = 40.0
"""No chance: chi-square with 7 degrees of freedom passes it once in 10^6, and all draws here are fixed."""


def chi_square(counts: Counter[int], probs: Sequence[float]) -> float:
    draws = counts.total()
    return sum((counts[index] - draws * prob) ** 2 / (draws * prob) for index, prob in enumerate(probs))


KEYS = {
    "seeds": [(seed, 7) for seed in range(8000)],
    "positions": [(-3, position) for position in range(8000)],
    "both": [(step, step) for step in range(8000)],
    "opposite": [(step, 8000 - step) for step in range(8000)],
    "far seeds": [((step * 2**49) - 2**62, 0) for step in range(8000)],
    "choices of one prompt": [(step * 0x9E3779B97F4A7C15, 40) for step in range(8000)],
    "tokens": [(5, 40, step) for step in range(8000)],
    "tokens far apart": [(5, 40, step * 17) for step in range(8000)],
    "tokens and positions": [(5, step, 8000 - step) for step in range(8000)],
}


@pytest.mark.parametrize("keys", KEYS.values(), ids=KEYS)
def test_uniform_numbers_are_spread_evenly_and_do_not_follow_each_other(keys: list[tuple[int, ...]]) -> None:
    numbers = [uniform(*key) for key in keys]
    assert all(0.0 < number < 1.0 for number in numbers) and len(set(numbers)) == len(numbers)
    assert chi_square(Counter(int(number * 8) for number in numbers), [1 / 8] * 8) < BOUND
    low_bits = Counter(int(number * 2**32) % 8 for number in numbers)
    assert chi_square(low_bits, [1 / 8] * 8) < BOUND
    for lag in (1, 2, 16):
        pairs = [(number - 0.5) * (later - 0.5) * 12 for number, later in zip(numbers, numbers[lag:], strict=False)]
        assert abs(sum(pairs) / math.sqrt(len(pairs))) < 5.0, lag


@pytest.mark.parametrize("temperature", [0.5, 1.0, 3.0])
@pytest.mark.parametrize("vary", ["seed", "position"])
def test_tokens_are_as_frequent_as_softmax_says(temperature: float, vary: str) -> None:
    logits = [1.0, 0.3, -0.2, 0.9, 1.4, -1.0, 0.0, 0.6]
    logits_RV = torch.tensor([logits]).expand(6000, -1)
    drawn = [choosing(temperature, **{vary: index}) for index in range(6000)]  # type: ignore[arg-type]
    assert chi_square(Counter(sample(logits_RV, drawn)), probabilities(logits, temperature)) < BOUND


@given(st.lists(st.tuples(few, rows), min_size=2, max_size=6), st.randoms(use_true_random=False))
def test_a_row_chooses_alone_what_it_chooses_among_others(cases: list[tuple[list[float], Choosing]], random) -> None:  # type: ignore[no-untyped-def]
    padded = [(logits + [-40.0] * (24 - len(logits)), row) for logits, row in cases]
    alone = [one(logits, row) for logits, row in padded]
    order = list(range(len(padded)))
    random.shuffle(order)
    together = sample(torch.tensor([padded[at][0] for at in order]), [padded[at][1] for at in order])
    assert together == [alone[at] for at in order]


def test_top_k_of_one_is_greedy_at_any_temperature() -> None:
    logits = [1.0, 1.5, 1.25, 0.5]
    assert {one(logits, choosing(1e8, top_k=1, seed=seed)) for seed in range(50)} == {1}


@pytest.mark.parametrize("spread", [0.1, 9.0])
@pytest.mark.parametrize("count", [50, 5000])
@pytest.mark.parametrize("row", [GREEDY, Choosing(0.8, 0, 1.0, 0.0, 5, 9), Choosing(1.2, 4000, 0.9, 0.0, -7, 2**31)])
def test_some_tokens_are_chosen_among_as_if_no_others_were_likely(row: Choosing, count: int, spread: float) -> None:
    draw = np.random.default_rng(1)
    for _ in range(5):
        ids_V = torch.from_numpy(np.sort(draw.choice(20000, count, replace=False)))
        some_V = torch.from_numpy(draw.standard_normal(count)).float() * spread
        all_V = torch.full((20000,), -math.inf).index_copy(0, ids_V, some_V)
        assert sample(some_V[None], [row], ids_V) == sample(all_V[None], [row])
    assert sample(some_V[None] + math.nan, [row], ids_V) == [-1]
    assert sample_drafts(some_V[None] + math.nan, [row], ids_V) == [0]
