"""Two engines in one process, on one event loop and on two: neither knows of the other."""

from __future__ import annotations

import threading
from typing import Any

import anyio
import pytest
from leftovers import Threads
from scripted import CAPACITY, capacity, check_serving, expected_ids, greedy, no_leaks, read, returned, serving, until

from headrace.engine import EngineCrashed, SamplingParams
from headrace.engine.testing import ScriptedEngine

pytestmark = pytest.mark.anyio

LOOPS: list[tuple[str, dict[str, Any]]] = [
    ("asyncio", {"use_uvloop": False}),
    ("asyncio", {"use_uvloop": True}),
    ("trio", {}),
]


async def check_many(engine: ScriptedEngine, name: str, count: int = 8) -> None:
    """Concurrent requests, all to their ends and token for token."""

    async def ask(number: int) -> None:
        prompt = f"{name} asks {number} " * (1 + number % 4)
        answer = await engine.generate(prompt, greedy(12 + number))
        assert answer.choices[0].token_ids == expected_ids(prompt, 12 + number)

    async with anyio.create_task_group() as tasks:
        for number in range(count):
            tasks.start_soon(ask, number)


async def test_two_engines_interleaved_on_one_loop() -> None:
    async with serving() as one, serving(capacity(num_pages=40, page_size=4, max_rows=3)) as other:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(check_many, one, "one")
            tasks.start_soon(check_many, other, "other", 4)
        ours = one.stream("the same prompt", greedy(20))
        theirs = other.stream("the same prompt", greedy(20))
        for expected in expected_ids("the same prompt", 20):
            assert (await anext(ours)).id == expected
            assert (await anext(theirs)).id == expected
        await returned(one)
        await returned(other)


async def test_one_engine_closes_and_the_other_serves_on() -> None:
    async with serving() as one:
        kept = one.stream("kept running", greedy(200))
        async with serving() as other:
            cut = other.stream("cut off", greedy(900))
            await anext(cut)
        assert (await read(cut))[-1].finish_reason == "cancelled"
        assert [token.id for token in await read(kept)] == expected_ids("kept running", 200)
        await check_serving(one)


async def test_engines_that_overlap_without_nesting() -> None:
    """Each is closed by hand, the older one first."""
    async with no_leaks():
        async with anyio.create_task_group() as tasks:
            opened: list[ScriptedEngine] = []
            leave = [anyio.Event(), anyio.Event()]

            async def host(number: int) -> None:
                async with ScriptedEngine(CAPACITY) as engine:
                    opened.append(engine)
                    await leave[number].wait()

            for number in (0, 1):
                tasks.start_soon(host, number)
                await until(lambda number=number: len(opened) > number)
            await check_many(opened[1], "second")
            leave[0].set()
            await until(lambda: opened[0]._serving.closing)
            await check_many(opened[1], "second, alone")
            leave[1].set()


async def test_one_engine_dies_and_the_other_serves_on() -> None:
    async with serving() as one:
        with pytest.raises(EngineCrashed):
            async with ScriptedEngine(CAPACITY) as other:

                def broken(*_: object) -> None:
                    raise ZeroDivisionError

                assert other._life.loop is not None
                other._life.loop.scheduler.plan = broken  # type: ignore[method-assign,assignment]
                with pytest.raises(EngineCrashed):
                    await other.generate("dies")
                await check_many(one, "survivor")
        await check_serving(one)


async def test_seeds_belong_to_their_engine() -> None:
    """What one engine draws for its requests does not depend on how many another has served."""

    def seeds(engine: ScriptedEngine) -> list[int]:
        return [
            engine.stream("x", SamplingParams(max_tokens=1))._generation.requests[0].asked.sampling.seed
            for _ in range(4)
        ]

    async with serving(seed=7) as one:
        alone = seeds(one)
    async with serving(seed=7) as one, serving(seed=8) as other:
        mixed = []
        for _ in range(4):
            seeds(other)
            mixed.append(one.stream("x", SamplingParams(max_tokens=1))._generation.requests[0].asked.sampling.seed)
    assert mixed == alone
    assert len(set(alone)) == 4


@pytest.mark.parametrize("second", LOOPS, ids=["asyncio", "uvloop", "trio"])
@pytest.mark.parametrize("first", LOOPS, ids=["asyncio", "uvloop", "trio"])
def test_two_event_loops_in_two_threads(first: tuple[str, Any], second: tuple[str, Any]) -> None:
    both_open = threading.Barrier(2, timeout=20)
    errors: list[BaseException] = []

    async def main(name: str) -> None:
        async with ScriptedEngine(CAPACITY) as engine:
            both_open.wait()
            for turn in range(2):
                await check_many(engine, f"{name} {turn}")
            async with engine.stream("left early", greedy(900)) as stream:
                await anext(stream)
            await returned(engine)

    def host(name: str, loop: tuple[str, Any]) -> None:
        try:
            anyio.run(main, name, backend=loop[0], backend_options=loop[1])
        except BaseException as error:
            errors.append(error)
            both_open.abort()

    started = Threads("")
    hosts = [threading.Thread(target=host, args=item) for item in (("first", first), ("second", second))]
    for thread in hosts:
        thread.start()
    for thread in hosts:
        thread.join(30)
    assert not errors
    started.check_ended()
