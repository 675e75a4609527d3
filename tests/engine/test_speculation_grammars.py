"""Requests that keep to a format have drafts, too, and give what they give without, whatever the drafts are."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import anyio
import numpy as np
import pytest
from formatted import JSON, ask_all
from simulation.grammar import END, compiled
from speculating import Answers, Guess, Oracle, always, guess_by, native, options, random_depths, told, wholes
from tiny_models import chat_folder

from headrace.engine import Engine, ResponseFormat, SamplingParams
from headrace.engine.grammar.compiled import _Matcher
from headrace.engine.model.cpu.grammars import CpuMasks
from headrace.engine.model.drafting.ngram import NgramDrafter
from headrace.engine.model.shared.draft_masks import masks_behind
from headrace.engine.speculation import Ngram

pytestmark = native


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return chat_folder(tmp_path_factory.mktemp("speculation"))


@pytest.fixture(scope="module")
def alone(model: Path) -> Answers:
    async def run() -> Answers:
        async with Engine(model, **options()) as engine:
            return await ask_all(engine)

    return anyio.run(run)


_CHANCE = random.Random(4)
DRAFTERS: dict[str, Callable[[], Guess]] = {
    "right": lambda: Oracle(0.0),
    "mostly right": lambda: Oracle(0.3),
    "always wrong": lambda: Oracle(1.0),
    "random": lambda: lambda tokens, most: [_CHANCE.randrange(257) for _ in range(_CHANCE.randint(0, most))],
    "n-gram": lambda: lambda tokens, most: NgramDrafter(3).draft(np.array(tokens), most),
}
ENGINES: dict[str, dict[str, Any]] = {
    "roomy": {},
    "far ahead": {"launch_ahead": 5, "page_size": 4},
    "short of pages": {"kv_memory": "48KiB", "page_size": 4, "max_rows": 6, "max_batched_tokens": 24},
}


@pytest.mark.parametrize("name", DRAFTERS)
@pytest.mark.parametrize("more", ENGINES.values(), ids=ENGINES)
def test_drafts_change_nothing(
    name: str, more: dict[str, Any], model: Path, alone: Answers, monkeypatch: pytest.MonkeyPatch
) -> None:
    guess = DRAFTERS[name]()
    if isinstance(guess, Oracle):
        guess.known = wholes(alone)
    guess_by(monkeypatch, guess, random_depths(4) if "launch_ahead" in more else always(4))

    async def run() -> None:
        async with Engine(model, speculation=Ngram(k=4), **options(**more)) as engine:
            assert told(await ask_all(engine)) == told(alone)
            counts = engine.stats()
            assert counts.drafted_tokens > 0
            if name == "right":
                assert counts.accepted_tokens > 0.8 * counts.drafted_tokens

    anyio.run(run)


def test_forced_text_is_drafted_by_the_grammar_itself(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the drafter knows nothing, and where it is wrong."""

    async def run(**more: Any) -> tuple[str, int]:
        async with Engine(model, **options(**more)) as engine:
            params = SamplingParams(temperature=0, response_format=JSON, logprobs=0)  # no token is taken unverified
            completion = await engine.generate("a", params)
            return completion.choices[0].text, engine.stats().accepted_tokens

    text, _ = anyio.run(run)
    for guess in (lambda tokens, most: [], lambda tokens, most: [0] * most):
        guess_by(monkeypatch, guess, always(4))
        again, accepted = anyio.run(lambda: run(speculation=Ngram(k=4)))
        assert again == text
        assert accepted > len(text) / 2


def a_draft_is_not_taken_back(monkeypatch: pytest.MonkeyPatch) -> None:
    rollback = _Matcher.rollback
    monkeypatch.setattr(_Matcher, "rollback", lambda self, count: rollback(self, max(0, count - 1)))


def masks_are_those_of_the_first_position(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CpuMasks, "banned_V", lambda self, row: self._rows[row].found.result()[0][0])


@pytest.mark.parametrize("plant", [a_draft_is_not_taken_back, masks_are_those_of_the_first_position])
def test_answers_tell_planted_bugs(
    plant: Callable[[pytest.MonkeyPatch], None], model: Path, alone: Answers, monkeypatch: pytest.MonkeyPatch
) -> None:
    oracle = Oracle(0.3)
    oracle.known = wholes(alone)
    guess_by(monkeypatch, oracle, always(4))
    plant(monkeypatch)

    async def run() -> bool:
        async with Engine(model, speculation=Ngram(), **options()) as engine:
            try:
                return told(await ask_all(engine)) == told(alone)
            except BaseExceptionGroup:  # a grammar that stands elsewhere may leave no token
                return False

    assert not anyio.run(run)


def test_masks_along_drafts_are_those_of_each_prefix() -> None:
    text = b'{"the_kind_of_thing": "river", "the_number_of_them": 77, "names": []}'
    grammar, ids, chance = compiled(JSON), list(text), random.Random(3)
    for _ in range(60):
        start = chance.randrange(len(ids))
        drafts = ids[start : start + chance.randint(1, 6)]
        right = chance.randint(0, len(drafts))
        if right < len(drafts):
            drafts[right] = END  # not allowed before the text is whole
        state = grammar.begin(ids[:start])
        masks = [first := state.allowed(), *masks_behind(state, first, drafts)]
        assert [_set(mask) for mask in masks] == [
            _set(grammar.begin(ids[: start + ahead]).allowed()) for ahead in range(right + 1)
        ]
        back = chance.randint(0, right)
        state.rollback(back)
        assert _set(state.allowed()) == _set(masks[right - back])


def test_the_end_of_a_text_is_taken_back() -> None:
    """Where it was a draft, and the text goes on or might end there."""
    grammar = compiled(ResponseFormat.choice(["stone", "stones"]))
    state = grammar.begin(list(b"ston"))
    for _ in range(3):
        assert len(list(masks_behind(state, state.allowed(), [ord("e"), END]))) == 2
        state.rollback(1)
        assert _set(state.allowed()) == [ord("s"), END]
        state.rollback(1)
        assert _set(state.allowed()) == [ord("e")]


def _set(mask: bytes) -> list[int]:
    """The ids whose bits are set."""
    found: list[int] = np.flatnonzero(np.unpackbits(np.frombuffer(mask, np.uint8), bitorder="little")).tolist()
    return found
