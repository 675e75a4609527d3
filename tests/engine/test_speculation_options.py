"""Each option of a request gives with drafts what it gives without: every field, hooks, adapters, and steps ahead."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import anyio
import numpy as np
import pytest
from adapter_folders import lora_folder
from drafting_engines import small_folder
from speculating import (
    EVERY_OPTION,
    Answers,
    Oracle,
    always,
    ask_every,
    guess_by,
    native,
    options,
    random_depths,
    told,
    wholes,
)
from tiny_models import chat_folder

from headrace.engine import Engine, SamplingParams
from headrace.engine.intake import requests
from headrace.engine.model.cpu.adapters import CpuBank
from headrace.engine.scheduling.speculation.depth import DepthRule
from headrace.engine.speculation import DraftModel, Ngram, Speculation
from headrace.engine.testing import no_pages_held
from headrace.ops.cpu.shape import Shaper


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return chat_folder(tmp_path_factory.mktemp("speculation"))


@pytest.fixture(scope="module")
def worn(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("adapters")
    return {name: lora_folder(folder / name, seed) for seed, name in enumerate(("one", "two"))}


async def serve(model: Path, worn: dict[str, Path], *, cancelled: bool = False, rounds: int = 1, **more: Any) -> Any:
    """The answers of one engine, once for each round, and what it counted."""
    given = options(adapter_slots=2, **more)
    async with Engine(model, **given) as engine:
        for name, folder in worn.items():
            await engine.adapters.load(name, folder)
        found = [told(await ask_every(engine, cancelled=cancelled)) for _ in range(rounds)]
        await no_pages_held(engine)
        return found, engine.stats()


@pytest.fixture(scope="module")
def alone(model: Path, worn: dict[str, Path]) -> Answers:
    """What an engine without speculation answers."""

    async def run() -> Answers:
        async with Engine(model, **options(adapter_slots=2)) as engine:
            for name, folder in worn.items():
                await engine.adapters.load(name, folder)
            return await ask_every(engine)

    return anyio.run(run)


def test_every_option_is_asked_for() -> None:
    """A new field has to be tried beside drafts, too."""
    asked = {name for each in EVERY_OPTION for name in each} | {"max_tokens"}
    assert set(SamplingParams.model_fields) - asked == set()


def oracle(alone: Answers, wrong: float) -> Oracle:
    made = Oracle(wrong)
    made.known = wholes(alone)
    return made


@pytest.mark.rotated(2)
@native
@pytest.mark.parametrize("ahead", range(1, 9))
@pytest.mark.parametrize("wrong", [0.0, 0.3, 1.0], ids=["right", "mostly right", "wrong"])
def test_no_option_notices_drafts(
    wrong: float, ahead: int, model: Path, worn: dict[str, Path], alone: Answers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However many steps are launched ahead, and behind prefix hits."""
    guess_by(monkeypatch, oracle(alone, wrong), random_depths(5) if ahead % 2 else always(5))
    more = {"speculation": Ngram(k=5), "launch_ahead": ahead, "page_size": 4 if ahead > 4 else 16}
    found, counts = anyio.run(lambda: serve(model, worn, rounds=1 + (ahead in (1, 8)), **more))
    assert all(each == told(alone) for each in found)
    assert counts.drafted_tokens > 100
    assert wrong or counts.accepted_tokens > 0.8 * counts.drafted_tokens
    assert wrong < 1 or counts.accepted_tokens < 0.1 * counts.drafted_tokens  # what a grammar forces is right


@native
@pytest.mark.parametrize("drafter", ["n-grams", "random", "draft model"])
def test_no_option_notices_who_drafts(
    drafter: str,
    model: Path,
    worn: dict[str, Path],
    alone: Answers,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    speculation: Speculation = Ngram(k=4, longest=2)
    if drafter == "draft model":
        speculation = DraftModel(small_folder(tmp_path / "draft"), k=4)
    if drafter == "random":
        chance = random.Random(7)
        guess_by(monkeypatch, lambda tokens, most: chance.choices(range(257), k=most), random_depths(4))
    monkeypatch.setattr(DepthRule, "choose", random_depths(4))
    more = {"speculation": speculation, "launch_ahead": 4, "page_size": 4}
    found, counts = anyio.run(lambda: serve(model, worn, rounds=2, **more))
    assert all(each == told(alone) for each in found)
    assert counts.drafted_tokens > 100 and 0 < counts.accepted_tokens < counts.drafted_tokens


TIGHT: dict[str, dict[str, Any]] = {
    "short of pages": {"kv_memory": "48KiB", "max_rows": 6, "max_batched_tokens": 24},
    "swapped": {"kv_memory": "48KiB", "swap_memory": "1MiB", "prefix_cache": False},
}


@native
@pytest.mark.parametrize("way", TIGHT)
@pytest.mark.parametrize("wrong", [0.0, 0.3, 1.0], ids=["right", "mostly right", "wrong"])
def test_no_option_notices_drafts_beside_requests_that_leave(
    way: str, wrong: float, model: Path, worn: dict[str, Path], alone: Answers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where pages run out and neighbours are cancelled in the middle of steps that are launched."""
    guess_by(monkeypatch, oracle(alone, wrong), random_depths(5))
    more = {"speculation": Ngram(k=5), "launch_ahead": 4, "page_size": 4, "cancelled": True, **TIGHT[way]}
    found, counts = anyio.run(lambda: serve(model, worn, **more))
    assert found == [told(alone)]
    assert counts.preemptions > 0 and counts.drafted_tokens > 100
    assert way != "swapped" or counts.swaps > 0


LONGEST = 28
"""Tokens of the longest prompt, at least."""


def worn_by_first_lines(users: Any) -> Any:
    """Let drafts wear no adapter."""

    def found(self: CpuBank, rows_N: Any, positions_N: Any) -> Any:
        drafts = np.flatnonzero((rows_N[1:] == rows_N[:-1]) & (positions_N[1:] >= LONGEST)) + 1
        rows_N = rows_N.copy()
        rows_N[drafts] = np.flatnonzero(self._slots < 0)[0]
        return users(self, rows_N, positions_N)

    return found


BUGS: dict[str, tuple[object, str, Callable[[Any], Any]]] = {
    "processors that wait for nobody": (requests, "_may_speculate", lambda old: lambda asking: True),
    "drafts that wear nothing": (CpuBank, "users", worn_by_first_lines),
    "penalties that miss tokens": (
        Shaper, "append", lambda old: lambda self, token: old(self, token) if token % 3 else None
    ),
}  # fmt: skip


@native
@pytest.mark.parametrize("bug", BUGS)
def test_answers_tell_planted_bugs(
    bug: str, model: Path, worn: dict[str, Path], alone: Answers, monkeypatch: pytest.MonkeyPatch
) -> None:
    guess_by(monkeypatch, oracle(alone, 0.3), always(5))
    owner, name, make = BUGS[bug]
    monkeypatch.setattr(owner, name, make(getattr(owner, name)))

    async def run() -> bool:
        try:
            found, _ = await serve(model, worn, speculation=Ngram(k=5))
        except BaseExceptionGroup:  # a hook's row that has drafts may fail altogether
            return False
        return bool(found == [told(alone)])

    assert not anyio.run(run)
