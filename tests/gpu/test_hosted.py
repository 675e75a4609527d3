"""What the host does between the logits and the choices of a device: forced tokens, and the caller's own code."""

from __future__ import annotations

import random
import threading
import time
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import numpy as np
import pytest
from gpu.conftest import Zoo
from gpu.driving import PATIENCE, at_rest, draw, open_engine
from random_schemas import random_schema

from headrace.engine import Engine, HookFailed, ResponseFormat, SamplingParams
from headrace.engine.grammar.compiled import _Matcher
from headrace.engine.model.shared.late_rows import LateRows
from headrace.engine.scheduling.order.pace import Pace

PROMPTS = [draw(3 + 7 * at, at) for at in range(10)]
PLAIN = [SamplingParams(temperature=1.0, seed=seed, max_tokens=60, top_k=[0, 30][seed % 2]) for seed in range(10)]

SCHEMAS = [ResponseFormat.json_schema(random_schema(seed)) for seed in range(16)]
JUMPING: dict[str, Any] = {"temperature": 1.2, "max_tokens": 300}


async def plain(engine: Engine) -> list[tuple[int, ...]]:
    """Tokens of rows that want nothing of the host."""
    return [tuple(each.choices[0].token_ids) for each in await engine.generate_many(PROMPTS, PLAIN)]


@pytest.mark.parametrize("launch_ahead", [1, 2])
def test_forced_tokens_are_taken_at_once_and_are_those_sampled_singly(
    zoo: Zoo, device: str, monkeypatch: pytest.MonkeyPatch, launch_ahead: int
) -> None:
    """With a stop string that never comes every token is sampled by itself: the same tokens, in more steps.

    Whether taking them at once is worth it is another matter: here it always is.
    """
    monkeypatch.setattr(Pace, "is_worth", lambda *_: True)

    def asked(**fields: Any) -> list[SamplingParams]:
        return [SamplingParams(**JUMPING, seed=at, response_format=each, **fields) for at, each in enumerate(SCHEMAS)]

    async def answers(engine: Engine, **fields: Any) -> tuple[list[list[int]], int]:
        before = engine.stats().steps
        found = await engine.generate_many([[65, 66]] * len(SCHEMAS), asked(**fields))
        return [answer.choices[0].token_ids for answer in found], engine.stats().steps - before

    async def run() -> None:
        options = {"launch_ahead": launch_ahead, "max_rows": 30, "max_context": 512}
        async with open_engine(zoo.folder("speaking"), device, **options) as engine:
            singly, many_steps = await answers(engine, stop="\0")
            at_once, few_steps = await answers(engine)
            assert at_once == singly and few_steps < many_steps
            alone = await plain(engine)
            beside: list[list[tuple[int, ...]]] = []

            async def others() -> None:
                beside.append(await plain(engine))

            async with anyio.create_task_group() as tasks:
                tasks.start_soon(others)
                assert (await answers(engine))[0] == singly
            assert beside == [alone]
            await at_rest(engine)

    anyio.run(run)


WORDS = [
    SamplingParams(temperature=1.0, seed=seed, max_tokens=40, response_format=ResponseFormat.regex("[a-z]{20,30}"))
    for seed in range(4)
]


async def check_late_masks(folder: Path, device: str, monkeypatch: pytest.MonkeyPatch, **options: Any) -> None:
    """Rows without a grammar end while masks of others are still to come; then masks come late now and then.

    Forced tokens are taken at once all the while, and every token is the one that comes when no mask is late.
    """
    shorter = JUMPING | {"max_tokens": 80}
    schemas = [SamplingParams(**shorter, seed=seed, response_format=each) for seed, each in enumerate(SCHEMAS[:3])]
    kept = [*WORDS, *schemas]
    note, hold, may_go, late = _Matcher.note, LateRows.hold, threading.Event(), []
    chance = random.Random(4)

    def waits(state: _Matcher, token: int) -> None:
        if len(state._tokens) == 4:
            assert may_go.wait(PATIENCE)
        note(state, token)

    def dawdles(state: _Matcher, token: int) -> None:
        if chance.random() < 0.2:
            time.sleep(chance.choice([0.001, 0.01]))
        note(state, token)

    def holds(rows: LateRows, row: int, place: int) -> None:
        late.append(row)
        hold(rows, row, place)

    async with open_engine(folder, device, **options) as engine:
        alone = await plain(engine)
        singly = [each.choices for each in await engine.generate_many([[65, 66]] * len(kept), kept)]

        async def formatted() -> None:
            found = await engine.generate_many([[65, 66]] * len(kept), kept)
            assert [each.choices for each in found] == singly

        monkeypatch.setattr(LateRows, "hold", holds)
        monkeypatch.setattr(Pace, "is_worth", lambda *_: True)
        for slow in (waits, dawdles):
            with monkeypatch.context() as patch, anyio.fail_after(PATIENCE):
                patch.setattr(_Matcher, "note", slow)
                async with anyio.create_task_group() as tasks:
                    tasks.start_soon(formatted)
                    assert await plain(engine) == alone
                    may_go.set()
            assert late, "no mask was late"
            late.clear()
        await at_rest(engine)


@pytest.mark.parametrize("launch_ahead", [1, 2, 4])
def test_nobody_waits_for_masks_of_others(
    zoo: Zoo, device: str, monkeypatch: pytest.MonkeyPatch, launch_ahead: int
) -> None:
    options = {"launch_ahead": launch_ahead, "max_rows": 30, "max_context": 512}
    anyio.run(partial(check_late_masks, zoo.folder("speaking"), device, monkeypatch, **options))


def test_hooks_choose_what_they_choose_on_a_cpu_and_fail_alone(zoo: Zoo, device: str) -> None:
    """Sampled, since the host draws the noise of their rows on both; beside rows that have none."""

    def sharper(tokens: list[int], logits: Any) -> Any:
        logits[tokens[-8:]] -= 3.0
        return logits * (1.0 + 0.25 * (len(tokens) % 4))

    def no_more(tokens: list[int], logits: Any) -> Any:
        if len(tokens) > 30:
            raise ValueError("that was enough")
        return np.where(logits > 0, logits, -np.inf)

    async def hooked(engine: Engine) -> list[tuple[int, ...]]:
        found: dict[int, tuple[int, ...]] = {}

        async def one(at: int) -> None:
            choice = (await engine.generate(PROMPTS[at], PLAIN[at], logits_processor=sharper)).choices[0]
            found[at] = tuple(choice.token_ids)

        async def fails() -> None:
            with pytest.raises(HookFailed):
                await engine.generate(PROMPTS[1], PLAIN[0], logits_processor=no_more)

        with anyio.fail_after(PATIENCE):
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(fails)
                for at in range(6):
                    tasks.start_soon(one, at)
        return [found[at] for at in range(6)]

    async def run(device: str) -> list[tuple[int, ...]]:
        found: list[list[tuple[int, ...]]] = []
        async with open_engine(zoo.folder("speaking"), device, max_rows=24, max_context=256) as engine:
            alone = await plain(engine)

            async def others() -> None:
                found.append(await plain(engine))

            async with anyio.create_task_group() as tasks:
                tasks.start_soon(others)
                chosen = await hooked(engine)
            assert found == [alone]
            await at_rest(engine)
        return chosen

    assert anyio.run(run, device) == anyio.run(run, "cpu")
