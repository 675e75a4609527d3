"""With speculation, every request gives what it gives without, whatever the drafts are and whatever else happens."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import anyio
import numpy as np
import pytest
from numpy.typing import NDArray
from tiny_models import chat_folder

from headrace.engine import Completion, Engine, InvalidParams, SamplingParams
from headrace.engine.model.drafting.ngram import NgramDrafter
from headrace.engine.scheduling.speculation.depth import DepthRule
from headrace.engine.speculation import Ngram
from headrace.ops.cpu.native.library import library

native = pytest.mark.skipif(library() is None, reason="no C compiler, or a processor without AVX2")

PROMPTS = [
    "one two three one two three one two",
    "the cat sat on the mat and the cat sat on the",
    "a",
    "one two three one two three one two three four five six seven eight nine ten",
    "x y x y x y x y x y x y x y x y x y x y x y x y x y x y x",
]
ASKED: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 1.0, "seed": 5},
    {"temperature": 1.5, "seed": 6, "top_k": 8, "logprobs": 2},
    {"temperature": 0.7, "seed": 7, "top_p": 0.8, "min_p": 0.02, "repetition_penalty": 1.3},
    {"temperature": 0.0, "presence_penalty": 1.5, "frequency_penalty": 0.7, "logprobs": 1, "prompt_logprobs": 1},
    {"temperature": 0.0, "bad_words": ("th", "ab"), "logit_bias": {65: 3.0}, "min_tokens": 5},
    {"temperature": 1.0, "seed": 8, "stop_token_ids": list(range(100, 110)), "n": 2},
    {"temperature": 1.0, "seed": 9, "stop": ["e", "t", "\u00c3"]},
    {"temperature": 0.0, "max_tokens": 3},
    {"temperature": 1.0, "seed": 11, "response_format": {"type": "json_object"}, "max_tokens": 12},
    {"temperature": 1.0, "seed": 12, "deterministic": True, "max_tokens": 8},
    {"temperature": 1.0, "seed": 13, "speculate": False},
    {"temperature": 0.0, "beam_width": 2, "max_tokens": 6},
]  # fmt: skip


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return chat_folder(tmp_path_factory.mktemp("speculation"))


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


async def ask_all(engine: Engine, asked: Sequence[dict[str, Any]] = ASKED) -> Answers:
    """The answers to all that is asked at once: ids, text, log-probabilities and how each ended."""
    found: Answers = {}
    prompts = PROMPTS

    async def one(index: int) -> None:
        params = SamplingParams(**({"max_tokens": 24} | asked[index]))
        completion = await engine.generate(prompts[index % len(prompts)], params)
        found[index] = completion

    async with anyio.create_task_group() as group:
        for index in range(len(asked)):
            group.start_soon(one, index)
    return found


def told(answers: Answers) -> dict[int, Any]:
    """All that callers see of the answers, but for what depends on who came first."""
    return {
        index: (answer.choices, answer.prompt_logprobs, answer.usage.completion_tokens)
        for index, answer in answers.items()
    }


@pytest.fixture(scope="module")
def alone(model: Path) -> Answers:
    """What an engine without speculation answers."""

    async def run() -> Answers:
        async with Engine(model, **options()) as engine:
            return await ask_all(engine)

    return anyio.run(run)


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


_CHANCE = random.Random(4)
DRAFTERS: dict[str, Callable[[], Guess]] = {
    "right": lambda: Oracle(0.0),
    "mostly right": lambda: Oracle(0.3),
    "always wrong": lambda: Oracle(1.0),
    "random": lambda: lambda tokens, most: [_CHANCE.randrange(256) for _ in range(_CHANCE.randint(0, most))],
    "n-gram": lambda: lambda tokens, most: NgramDrafter(3).draft(np.array(tokens), most),
}


@native
@pytest.mark.parametrize("name", DRAFTERS)
@pytest.mark.parametrize(
    "more",
    [
        {},
        {"launch_ahead": 5, "page_size": 4},
        {"kv_memory": "36KiB", "page_size": 4, "max_rows": 6, "max_batched_tokens": 24},
        {"kv_memory": "36KiB", "page_size": 4, "swap_memory": "1MiB", "prefix_cache": False},
    ],
    ids=["roomy", "far ahead", "short of pages", "swapped"],
)
def test_drafts_change_nothing(
    name: str, more: dict[str, Any], model: Path, alone: Answers, monkeypatch: pytest.MonkeyPatch
) -> None:
    guess = DRAFTERS[name]()
    if isinstance(guess, Oracle):
        guess.known = [
            answer.prompt_token_ids + choice.token_ids for answer in alone.values() for choice in answer.choices
        ]
    guesser = guess_by(monkeypatch, guess, random_depths(4) if "launch_ahead" in more else always(4))

    async def run() -> None:
        async with Engine(model, speculation=Ngram(k=4), **options(**more)) as engine:
            assert told(await ask_all(engine)) == told(alone)
            again = await ask_all(engine)  # behind prefix hits
            assert told(again) == told(alone)
            counts = engine.stats()
            assert 0 < counts.drafted_tokens <= guesser.count
            if name == "right":
                assert counts.accepted_tokens > 0.8 * counts.drafted_tokens
            if name == "always wrong":
                assert counts.accepted_tokens == 0
            if "kv_memory" in more:
                assert counts.preemptions > 0
            if "swap_memory" in more:
                assert counts.swaps > 0

    anyio.run(run)
