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
from speculating import Answers, Guess, Oracle, always, guess_by, native, options, random_depths, told, wholes
from tiny_models import chat_folder
from torch import Tensor

from headrace.engine import Engine, EngineConfig, InvalidParams, SamplingParams
from headrace.engine.model.cpu.drafts import CpuDrafts, verify
from headrace.engine.model.cpu.rows import CpuRows
from headrace.engine.model.drafting.ngram import NgramDrafter
from headrace.engine.model.shared.runs import Verified
from headrace.engine.scheduling.plan import Work
from headrace.engine.speculation import Ngram, speculation_of
from headrace.engine.testing import no_pages_held
from headrace.ops.cpu.shape import Shaper

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


_WITH_GRAMMARS = [index for index, asked in enumerate(ASKED) if "response_format" in asked]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return chat_folder(tmp_path_factory.mktemp("speculation"))


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


@pytest.fixture(scope="module")
def alone(model: Path) -> Answers:
    """What an engine without speculation answers."""

    async def run() -> Answers:
        async with Engine(model, **options()) as engine:
            return await ask_all(engine)

    return anyio.run(run)


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
        guess.known = wholes(alone)
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
            if name == "always wrong":  # what a grammar forces is drafted in place of guesses, and right
                forced = 2 * sum(alone[index].usage.completion_tokens for index in _WITH_GRAMMARS)
                assert counts.accepted_tokens <= forced < counts.drafted_tokens / 5
            if "kv_memory" in more:
                assert counts.preemptions > 0
            if "swap_memory" in more:
                assert counts.swaps > 0

    anyio.run(run)


BUGS: dict[str, Callable[[pytest.MonkeyPatch], None]] = {}


def bug(plant: Callable[[pytest.MonkeyPatch], None]) -> Callable[[pytest.MonkeyPatch], None]:
    BUGS[plant.__name__] = plant
    return plant


@bug
def one_accepted_too_many(monkeypatch: pytest.MonkeyPatch) -> None:
    def verifies(logits_SV: Tensor, works: Sequence[Work], drafted: Sequence[int], *rest: Any) -> list[Verified]:
        tokens_RN: NDArray[np.int64] = rest[0]
        guesses = [tokens_RN[work.row, work.start + 1 : work.start + work.num_tokens].tolist() for work in works]
        found = verify(logits_SV, works, drafted, *rest)
        for each, guess in zip(found, guesses, strict=True):
            if len(each.tokens) <= len(guess):
                each.tokens[-1] = guess[len(each.tokens) - 1]
        return found

    monkeypatch.setattr("headrace.engine.model.cpu.runner.verify", verifies)


@bug
def noise_of_the_next_position(monkeypatch: pytest.MonkeyPatch) -> None:
    choosing = CpuRows.choosing

    def shifted(self: CpuRows, work: Work) -> Any:
        found = choosing(self, work)
        return found._replace(position=found.position + (work.num_tokens > 1 and work.start > 30))

    monkeypatch.setattr(CpuRows, "choosing", shifted)


@bug
def stale_counts_of_penalties(monkeypatch: pytest.MonkeyPatch) -> None:
    append = Shaper.append
    calls = iter(range(10**9))
    monkeypatch.setattr(Shaper, "append", lambda self, token: append(self, token) if next(calls) % 2 else None)


@bug
def drafts_left_in_the_row(monkeypatch: pytest.MonkeyPatch) -> None:
    reach = CpuDrafts.reach
    monkeypatch.setattr(CpuDrafts, "reach", lambda self, row, length: reach(self, row, length + (length % 7 == 0)))


@native
@pytest.mark.parametrize("name", BUGS)
def test_answers_tell_planted_bugs(name: str, model: Path, alone: Answers, monkeypatch: pytest.MonkeyPatch) -> None:
    oracle = Oracle(0.3)
    oracle.known = wholes(alone)
    guess_by(monkeypatch, oracle, always(4))
    BUGS[name](monkeypatch)

    async def run() -> None:
        async with Engine(model, speculation=Ngram(), **options()) as engine:
            assert told(await ask_all(engine)) != told(alone)

    anyio.run(run)


@native
def test_turns_go_on_behind_stop_strings_and_branches_from_the_middle_of_a_run(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Several tokens come at once, of which those behind a stop string belong to nobody."""

    async def talk(engine: Engine) -> list[Any]:
        heard: list[Any] = []
        for seed in range(6):
            params = SamplingParams(temperature=1.2, seed=seed, max_tokens=30, stop=["e", "a", "i"])
            async with engine.stream("once upon a time", params) as stream:
                first = [token async for token in stream]
                heard.append(([token.id for token in first], stream.usage.completion_tokens))
                await stream.send(" and then")
                heard.append(([token.id async for token in stream], stream.usage.prompt_tokens))
            async with engine.stream("once upon", SamplingParams(temperature=1.0, seed=seed, max_tokens=20)) as stream:
                await anext(stream)
                async with stream.fork(seed=seed) as branch:
                    heard.append([token.id async for token in branch])
                heard.append([token.id async for token in stream])
        return heard

    async def run(**more: Any) -> list[Any]:
        async with Engine(model, **options(**more)) as engine:
            return await talk(engine)

    before = anyio.run(run)
    known = [heard for heard in before if isinstance(heard, list)]
    guess_by(monkeypatch, lambda tokens, most: _going_on(known, list(tokens), most), always(4))
    assert anyio.run(lambda: run(speculation=Ngram())) == before


def _going_on(known: Sequence[list[int]], tokens: list[int], most: int) -> list[int]:
    """What followed the last two tokens anywhere in what is known."""
    for each in known:
        for at in range(2, len(each)):
            if each[at - 2 : at] == tokens[-2:]:
                return each[at : at + most]
    return [0] * most


@native
def test_cancelled_requests_give_everything_back(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    guess_by(monkeypatch, lambda tokens, most: [0] * most, always(4))

    async def run() -> None:
        async with Engine(model, speculation=Ngram(), **options(launch_ahead=4)) as engine:
            for count in range(8):
                async with engine.stream("one two", SamplingParams(max_tokens=100, ignore_eos=True)) as stream:
                    for _ in range(count):
                        await anext(stream)
            await no_pages_held(engine)

    anyio.run(run)


@native
def test_requests_may_go_without(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    guesser = guess_by(monkeypatch, lambda tokens, most: [1] * most, always(4))

    async def run() -> None:
        async with Engine(model, speculation=Ngram(), **options()) as engine:
            await engine.generate("one two", SamplingParams(max_tokens=8, speculate=False))
            assert guesser.count == engine.stats().drafted_tokens == 0
            await engine.generate("one two", SamplingParams(max_tokens=8))
            stats = engine.stats()
            assert guesser.count == stats.drafted_tokens > 0
            assert stats.draft_runs > 0 and stats.mean_accepted_length == 1.0 and stats.speculation_depth >= 0

    anyio.run(run)


def slow_guess(tokens: Sequence[int], longest: int, most: int) -> list[int]:
    """The definition: the latest earlier place with the most equal tokens before it, and what follows, repeated."""
    for count in range(longest, 1, -1):
        for end in range(len(tokens) - 1, count - 1, -1):
            if len(tokens) > count and list(tokens[end - count : end]) == list(tokens[-count:]):
                known = list(tokens)
                for ahead in range(most):
                    known.append(known[end + ahead])
                return known[len(tokens) :]
    return []


def test_ngrams_are_those_of_the_definition() -> None:
    chance = random.Random(2)
    drafter, some = NgramDrafter(4), 0
    for _ in range(2000):
        tokens = [chance.randrange(chance.choice([2, 4, 9])) for _ in range(chance.randint(0, 14))]
        most = chance.randint(1, 5)
        drafts = drafter.draft(np.array(tokens, np.int64), most)
        assert drafts == slow_guess(tokens, 4, most), tokens
        some += bool(drafts)
    assert some > 300


def test_ways_of_guessing_are_values_or_text(tmp_path: Path) -> None:
    assert speculation_of("ngram") == Ngram(k=4, longest=4) == EngineConfig(model="m", speculation="ngram").speculation
    assert speculation_of("ngram:k=2,longest=3") == Ngram(2, 3)
    assert EngineConfig(model="m").speculation is None
    for wanted, field, message in (
        ("ngrams", "speculation", "must begin with one of ngram"),
        (3, "speculation", "must be None, a value such as"),
        ("ngram:n=3", "speculation.n", "only k, longest"),
        ("ngram:k=0", "speculation.k", "from 1 to 16, got 0"),
        ("ngram:k=many", "speculation.k", "from 1 to 16, got 'many'"),
        ("ngram:longest=1", "speculation.longest", "from 2 to 32"),
        ("ngram:k=4,k=5", "speculation.k", "is given twice"),
    ):
        with pytest.raises(InvalidParams, match=message) as refused:
            EngineConfig(model="m", speculation=wanted)  # type: ignore[arg-type]
        assert refused.value.field == field
    with pytest.raises(InvalidParams, match="from 1 to 16") as refused:
        Ngram(k=17)
    assert refused.value.limit == {"ge": 1, "le": 16}


@pytest.mark.parametrize(
    ("tokens", "rows", "most", "told"),
    [(3, 1, 1, "speculation.k: it is 3, and steps verify at most 1 of a row: max_batched_tokens is 3"),
     (6, 3, 2, "max_rows: it is 3, and steps of more than 2 rows that speculate verify no drafts"),
     (64, 8, 3, "")],
)  # fmt: skip
def test_steps_without_room_for_drafts_are_warned_of(
    tokens: int, rows: int, most: int, told: str, model: Path, monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    guess_by(monkeypatch, lambda tokens, most: [7] * most, always(3))

    async def run() -> None:
        sizes: dict[str, Any] = {"max_batched_tokens": tokens, "max_rows": rows}
        async with Engine(model, speculation=Ngram(k=3), **options(**sizes)) as engine:
            await engine.generate("abab" * 5, SamplingParams(max_tokens=40, temperature=0.0, ignore_eos=True))
            verified = [count > 0 for count in engine.stats().drafted_by_position]
            assert verified == [place < most for place in range(3)]

    anyio.run(run)
    assert told in caplog.text if told else "speculat" not in caplog.text
    with pytest.raises(InvalidParams, match="max_batched_tokens: must be at least 3 with the option speculation") as no:
        Engine(model, speculation=Ngram(k=3), **options(max_batched_tokens=2, max_rows=1))
    assert (no.value.field, no.value.value, no.value.limit) == ("max_batched_tokens", 2, {"ge": 3})
