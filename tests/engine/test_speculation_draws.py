"""Tokens chosen behind drafts are distributed as they ought to be, and equal those that are chosen one by one.

The logits of a made-up model depend on the token before alone, and penalties on all of them, so that the probability of
each completion of three tokens is known. The engine's own sampler, penalties and verification choose them, a batch of
seeds at a time. `HEADRACE_DRAWS=100000`, as in `make soak`, draws more.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from headrace.engine.model.cpu import drafts as cpu_drafts
from headrace.engine.model.cpu.drafts import CpuDrafts, Verified
from headrace.engine.model.cpu.rows import CpuRows
from headrace.engine.scheduling.asked import Asked, Sampling
from headrace.engine.scheduling.plan import Capacity, NewRow, RowOptions, StepPlan, Work
from headrace.engine.scheduling.request import Request
from headrace.engine.scheduling.shaping import Report, Shaping
from headrace.ops.cpu.shape import Shaper

DRAWS = int(os.environ.get("HEADRACE_DRAWS", "3000"))
VOCAB, LENGTH, ROWS = 6, 3, 200
PROMPT = [1, 4]
SAMPLING = Sampling(temperature=0.9, top_k=5)
SHAPING = Shaping(repetition_penalty=1.3, frequency_penalty=0.5, presence_penalty=0.8)
LOGITS = np.random.default_rng(7).normal(0.0, 1.5, (VOCAB, VOCAB)).astype(np.float32)
CAPACITY = Capacity(
    num_pages=ROWS, page_size=16, max_rows=ROWS, max_batched_tokens=16 * ROWS, max_context=16, vocab_size=VOCAB
)
Cells = NDArray[np.float64]


class Likely:
    """Drafts the likeliest tokens, or the second likeliest, so that some of each length are right."""

    def draft(self, tokens_N: NDArray[np.int64], most: int) -> list[int]:
        found, last = list[int](), int(tokens_N[-1])
        for ahead in range(most):
            last = int(np.argsort(-LOGITS[last])[(len(tokens_N) + ahead) % 2])
            found.append(last)
        return found


class Batch:
    """Rows of the same prompt and other seeds, which are chosen for together."""

    def __init__(self, seeds: Sequence[int]) -> None:
        self._rows, self._drafts = CpuRows(CAPACITY), CpuDrafts(CAPACITY, Likely())
        self._requests = [Request(Asked(limit=16, sampling=SAMPLING, speculates=True), list(PROMPT)) for _ in seeds]
        plan = StepPlan(step=0)
        for row, seed in enumerate(seeds):
            sampling = Sampling(temperature=SAMPLING.temperature, top_k=SAMPLING.top_k, seed=seed)
            plan.new_rows.append(NewRow(row, 0, list(PROMPT), sampling, speculates=True))
            plan.options.append(RowOptions(row, list(PROMPT), len(PROMPT), SHAPING, None, None))
        self._drafts.update(plan, self._rows.update(plan))

    def draw(self, depth: int) -> list[tuple[int, ...]]:
        """Return a completion for each seed, from steps with so many drafts."""
        found: list[list[int]] = [[] for _ in self._requests]
        while going := [row for row, tokens in enumerate(found) if len(tokens) < LENGTH]:
            starts = [len(PROMPT) + len(found[row]) - 1 for row in going]
            decodes = [self._requests[row] for row in going]
            plan = StepPlan(step=1, decodes=decodes, rows=going, starts=starts, depth=depth)
            plan.drafts = [depth] * len(going)
            tokens_RN = self._rows.tokens_RN
            works, drafted = self._drafts.place(plan, tokens_RN, self._rows.goes_on, lambda row, drafts, most: drafts)
            before = [tokens_RN[work.row, work.start + at] for work in works for at in range(work.num_tokens)]
            logits_SV = torch.from_numpy(LOGITS[before])
            verified = cpu_drafts.verify(logits_SV, works, drafted, tokens_RN, self._rows.goes_on, self._choose)
            for row, (tokens, _) in zip(going, verified, strict=True):
                found[row] += tokens
        return [tuple(tokens[:LENGTH]) for tokens in found]

    def _choose(self, logits_AV: Tensor, parts: Sequence[Work]) -> tuple[list[int], dict[int, Report]]:
        rows = self._rows
        chosen, reports, _ = rows.options.choose(logits_AV, parts, list(map(rows.choosing, parts)), rows.known)
        rows.append(parts, chosen)
        for part in parts:
            self._drafts.reach(part.row, part.start + part.num_tokens + 1)
        return chosen, reports


def drawn(depth: int) -> list[tuple[int, ...]]:
    found: list[tuple[int, ...]] = []
    for start in range(0, DRAWS, ROWS):
        found += Batch(range(start, min(start + ROWS, DRAWS))).draw(depth)
    return found


def exact() -> Cells:
    """The probability of each completion, float64 [first, second, third], worked out from the definitions."""
    found: Cells = np.zeros((VOCAB,) * LENGTH)
    for tokens in itertools.product(range(VOCAB), repeat=LENGTH):
        probability = 1.0
        for place, token in enumerate(tokens):
            probability *= _next([*PROMPT, *tokens[:place]])[token]
        found[tokens] = probability
    return found


def _next(known: Sequence[int]) -> Cells:
    logits_V, completion = LOGITS[known[-1]].astype(np.float64), known[len(PROMPT) :]
    for token in set(known):
        logits_V[token] *= SHAPING.repetition_penalty if logits_V[token] < 0 else 1 / SHAPING.repetition_penalty
    for token in completion:
        logits_V[token] -= SHAPING.frequency_penalty
    for token in set(completion):
        logits_V[token] -= SHAPING.presence_penalty
    logits_V[np.argsort(logits_V)[: VOCAB - SAMPLING.top_k]] = -np.inf
    weights_V = np.exp((logits_V - logits_V.max()) / SAMPLING.temperature)
    found: Cells = weights_V / weights_V.sum()
    return found


def counts_of(completions: Sequence[tuple[int, ...]]) -> Cells:
    found: Cells = np.zeros((VOCAB,) * LENGTH)
    np.add.at(found, tuple(np.array(completions).T), 1)
    return found


def distance(counts: Cells, expected: Cells) -> float:
    """The total variation between the two, over what it is on average among samples of this size."""
    size = counts.sum()
    mean = np.sqrt(expected * (1.0 - expected) / size).sum() / np.sqrt(2 * np.pi)
    return float(0.5 * np.abs(counts / size - expected).sum() / mean)


def surprise(counts: Cells, expected: Cells) -> float:
    """How many deviations the chi-square of neighbouring tokens lies above its mean, at most."""
    found = []
    for axis in (2, 0):
        seen, mean = counts.sum(axis).ravel(), expected.sum(axis).ravel() * counts.sum()
        often = mean >= 5
        seen, mean = [np.append(each[often], each[~often].sum()) for each in (seen, mean)]
        seen, mean = seen[mean > 0], mean[mean > 0]
        freedom = len(mean) - 1
        found.append((((seen - mean) ** 2 / mean).sum() - freedom) / np.sqrt(2 * freedom))
    return float(max(found))


def is_right(completions: Sequence[tuple[int, ...]]) -> bool:
    counts, expected = counts_of(completions), exact()
    return distance(counts, expected) < 1.6 and surprise(counts, expected) < 4.0


@pytest.fixture(scope="module")
def one_by_one() -> list[tuple[int, ...]]:
    return drawn(0)


def test_tokens_without_drafts_have_the_exact_distribution(one_by_one: list[tuple[int, ...]]) -> None:
    assert abs(exact().sum() - 1.0) < 1e-9
    assert is_right(one_by_one)


@pytest.mark.parametrize("depth", [1, 2])
def test_tokens_behind_drafts_have_the_exact_distribution(depth: int, one_by_one: list[tuple[int, ...]]) -> None:
    completions = drawn(depth)
    assert is_right(completions)
    assert completions == one_by_one


BUGS: dict[str, Callable[[pytest.MonkeyPatch], None]] = {}


def bug(plant: Callable[[pytest.MonkeyPatch], None]) -> Callable[[pytest.MonkeyPatch], None]:
    BUGS[plant.__name__] = plant
    return plant


@bug
def one_accepted_too_many(monkeypatch: pytest.MonkeyPatch) -> None:
    verify = cpu_drafts.verify

    def verifies(logits_SV: Tensor, works: Sequence[Work], drafted: Sequence[int], *rest: Any) -> list[Verified]:
        tokens_RN: NDArray[np.int64] = rest[0]
        guesses = [tokens_RN[work.row, work.start + 1 : work.start + work.num_tokens].tolist() for work in works]
        found = verify(logits_SV, works, drafted, *rest)
        for each, work, guess in zip(found, works, guesses, strict=True):
            if len(each.tokens) <= len(guess):
                each.tokens[-1] = guess[len(each.tokens) - 1]
                tokens_RN[work.row, work.start + len(each.tokens)] = each.tokens[-1]
        return found

    monkeypatch.setattr(cpu_drafts, "verify", verifies)


@bug
def noise_of_the_next_position(monkeypatch: pytest.MonkeyPatch) -> None:
    choosing = CpuRows.choosing

    def shifted(self: CpuRows, work: Work) -> Any:
        found = choosing(self, work)
        return found._replace(position=found.position + (work.num_tokens > 1))

    monkeypatch.setattr(CpuRows, "choosing", shifted)


@bug
def stale_counts_of_penalties(monkeypatch: pytest.MonkeyPatch) -> None:
    choose = Batch._choose

    def chooses(self: Batch, logits_AV: Tensor, parts: Sequence[Work]) -> Any:
        with pytest.MonkeyPatch.context() as patch:
            if parts[0].num_tokens == 1:
                patch.setattr(Shaper, "append", lambda shaper, token: None)
            return choose(self, logits_AV, parts)

    monkeypatch.setattr(Batch, "_choose", chooses)


@pytest.mark.parametrize("name", BUGS)
def test_the_distribution_tells_planted_bugs(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    BUGS[name](monkeypatch)
    assert not is_right(drawn(2))
