"""Drafters that tests put in the place of an engine's own, and answers with drafts beside those without."""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Sequence
from typing import Any

import anyio
import numpy as np
import pytest
from numpy.typing import NDArray

from headrace.engine import Completion, Engine, SamplingParams
from headrace.engine.scheduling.speculation.depth import DepthRule
from headrace.ops.cpu.native.library import library

__all__ = ["Answers", "Guess", "Guesser", "Oracle", "always", "guess_by", "native", "options", "random_depths", "told"]
__all__ += ["EVERY_OPTION", "EVERY_PROMPT", "ask_every", "wholes"]

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
        matching = [known for known in self.known if known[: len(tokens)] == tokens]
        places = range(len(tokens), min(len(tokens) + most, len(matching[0]))) if matching else ()
        return [self._draft(place, matching) for place in places]

    def _draft(self, place: int, matching: list[list[int]]) -> int:
        """Draft the token at a place; a wrong one is wrong for all answers that begin in the same way."""
        right = matching[0][place]
        if self._chance.random() >= self._wrong:
            return right
        possible = {known[place] for known in matching if place < len(known)}
        return next(id % 257 for id in range(right + 1, right + 257) if id % 257 not in possible)


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


EVERY_PROMPT = ["one two three one two three", "the cat sat on the mat", "a", "x y x y x y x y x y x y"]


def odd_then_even(tokens: list[int], logits: Any) -> Any:
    """Which tokens may follow depends on how many there are."""
    logits[len(tokens) % 2 :: 2] = -np.inf
    return logits


def sevenfold(token: Any) -> bool:
    return int(token.id) % 7 == 0


HOT: dict[str, Any] = {"temperature": 1.2, "seed": 4}
EVERY_OPTION: list[dict[str, Any]] = [
    {"top_k": 5} | HOT,
    {"top_p": 0.7} | HOT,
    {"min_p": 0.05, "logprobs": 3} | HOT,
    {"presence_penalty": 1.0} | HOT,
    {"frequency_penalty": 0.9, "temperature": 0.0},
    {"repetition_penalty": 1.4, "temperature": 0.0, "prompt_logprobs": 2},
    {"logit_bias": {65: 4.0, 66: -3.0}} | HOT,
    {"allowed_token_ids": range(60, 90)} | HOT,
    {"forbidden_token_ids": range(0, 120)} | HOT,
    {"bad_words": ("a", "th", "Zz")} | HOT,
    {"stop": ["b", "zz"], "include_stop_str_in_output": True, "min_tokens": 4} | HOT,
    {"stop_token_ids": range(95, 110), "ignore_eos": True} | HOT,
    {"logit_bias": {256: 6.0}, "skip_special_tokens": False, "spaces_between_special_tokens": True} | HOT,
    {"response_format": {"type": "regex", "regex": "[a-f]{3,40}"}} | HOT,
    {"response_format": {"type": "choice", "choice": ["one way", "one other"]}, "logprobs": 1} | HOT,
    {"n": 3, "best_of": 4} | HOT,
    {"beam_width": 3, "length_penalty": 0.5, "early_stopping": True, "max_tokens": 6, "temperature": 0.0},
    {"deterministic": True, "max_tokens": 8} | HOT,
    {"speculate": False} | HOT,
    {"adapter": "one"} | HOT,
    {"adapter": "two", "repetition_penalty": 1.2} | HOT,  # without log-probabilities: updates round by their number
    {"adapter": "one", "temperature": 0.0, "n": 2},
    {"logits_processor": odd_then_even} | HOT,
    {"stop_when": sevenfold} | HOT,
    {"cache_salt": "mine", "priority": 3, "tenant": "t"} | HOT,
]  # fmt: skip
_NOT_OF_PARAMS = ("adapter", "logits_processor", "stop_when", "cache_salt", "priority", "tenant")


async def ask_every(engine: Engine, *, but: Collection[str] = (), cancelled: bool = False) -> Answers:
    """The answers to all options at once, but for requests with some, beside requests that leave in the middle."""
    found: Answers = {}
    chance, prompts = random.Random(2), EVERY_PROMPT

    async def one(index: int) -> None:
        params = {"max_tokens": 24} | EVERY_OPTION[index]
        beside = {name: params.pop(name) for name in _NOT_OF_PARAMS if name in params}
        found[index] = await engine.generate(prompts[index % len(prompts)], SamplingParams(**params), **beside)

    async def leave(count: int) -> None:
        async with engine.stream(prompts[count % len(prompts)], SamplingParams(max_tokens=90, seed=count)) as stream:
            for _ in range(count):
                await anext(stream, None)

    async with anyio.create_task_group() as group:
        for index, asked in enumerate(EVERY_OPTION):
            if not asked.keys() & set(but):
                group.start_soon(one, index)
            if cancelled:
                group.start_soon(leave, chance.randint(0, 20))
    return found
