"""Drafters that tests put in the place of an engine's own, and answers with drafts beside those without."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from headrace.engine import Completion
from headrace.engine.scheduling.speculation.depth import DepthRule
from headrace.ops.cpu.native.library import library

__all__ = ["Answers", "Guess", "Guesser", "Oracle", "always", "guess_by", "native", "options", "random_depths", "told"]
__all__ += ["wholes"]

native = pytest.mark.skipif(library() is None, reason="no C compiler, or a processor without AVX2")

Guess = Callable[[Sequence[int], int], list[int]]


class Guesser:
    """A drafter by a function; counts its drafts."""

    def __init__(self, guess: Guess) -> None:
        self._guess = guess
        self.count = 0

    def draft(self, tokens_N: NDArray[np.int64], most: int) -> list[int]:
        drafts = self._guess(tokens_N.tolist(), most)[:most]
        self.count += len(drafts)
        return drafts


class Oracle:
    """Knows what comes, from another engine's answers; some of its drafts are wrong."""

    def __init__(self, wrong: float) -> None:
        self.known: list[list[int]] = []
        self._wrong = wrong
        self._chance = random.Random(3)

    def __call__(self, tokens: Sequence[int], most: int) -> list[int]:
        for known in self.known:
            if known[: len(tokens)] == tokens:
                drafts = known[len(tokens) : len(tokens) + most]
                return [(id + 1) % 257 if self._chance.random() < self._wrong else id for id in drafts]
        return []


def options(**more: Any) -> dict[str, Any]:
    return {"device": "cpu", "cpu_threads": 1, "kv_memory": "1MiB", "dtype": "float32", "seed": 3} | more


Answers = dict[int, Completion]


def told(answers: Answers) -> dict[int, Any]:
    """All that callers see of the answers, but for what depends on who came first."""
    return {
        index: (answer.choices, answer.prompt_logprobs, answer.usage.completion_tokens)
        for index, answer in answers.items()
    }


def wholes(answers: Answers) -> list[list[int]]:
    """The tokens of prompts and answers together."""
    return [each.prompt_token_ids + choice.token_ids for each in answers.values() for choice in each.choices]


def always(depth: int) -> Callable[..., int]:
    return lambda self, rows, context: depth


def random_depths(most: int) -> Callable[..., int]:
    chance = random.Random(1)
    return lambda self, rows, context: chance.randint(0, most)


def guess_by(monkeypatch: pytest.MonkeyPatch, guess: Guess, choose: Callable[..., int]) -> Guesser:
    """Let engines that open from now on draft by `guess`, as deep as `choose` says."""
    guesser = Guesser(guess)
    monkeypatch.setattr("headrace.engine.model.cpu.opening.NgramDrafter", lambda longest: guesser)
    monkeypatch.setattr(DepthRule, "choose", choose)
    return guesser
