"""Memory goes and comes back under an engine that serves: no token changes, and others may have it meanwhile."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, Literal

import anyio
import pytest
from gpu.checkpoints import kv_bytes
from gpu.conftest import Zoo
from gpu.driving import at_rest, draw, open_engine, together
from gpu.test_memory import SLACK, filled, used
from gpu.test_swap import COUNT, expected

from headrace.engine import DeviceUnavailable, Engine, SamplingParams

PROMPTS = [draw(length, length) for length in (60, 50, 40, 35, 30, 25, 20, 55, 90, 33, 47, 61)]
GREEDY = SamplingParams(max_tokens=COUNT, temperature=0, ignore_eos=True)


async def answers(engine: Engine, during: Callable[[], Awaitable[None]]) -> list[list[int]]:
    """What the prompts give while something happens to the engine's memory."""
    found: list[Any] = []

    async def ask() -> None:
        found.extend(await together(engine, PROMPTS, GREEDY))

    async with anyio.create_task_group() as group:
        group.start_soon(ask)
        await during()
    await at_rest(engine)
    return [list(output.tokens) for output in found]


async def progress(engine: Engine, tokens: int) -> None:
    """Wait for so many more tokens."""
    wanted = engine.stats().generated_tokens + tokens
    with anyio.fail_after(60):
        while engine.stats().generated_tokens < wanted:  # noqa: ASYNC110 - it has no event
            await anyio.sleep(0.001)


def check_resizing_under_load(zoo: Zoo, device: str, launch_ahead: int, swaps: bool) -> None:
    """On the exact checkpoint: a page that is lost, or read too late, changes tokens."""
    page = kv_bytes(zoo.folder("exact"), 1)
    options = {"kv_memory": 120 * page, "swap_memory": 400 * page if swaps else 0, "launch_ahead": launch_ahead}

    async def run() -> list[list[int]]:
        async with open_engine(zoo.folder("exact"), device, **options) as engine:
            assert engine._life.loop is not None
            engine._life.loop.scheduler.swaps.host.page_seconds = 1e-9  # so that swapping is chosen, where it can be

            async def resize() -> None:
                for pages in (70, 20, 200, 30, 90):
                    await progress(engine, 60)
                    await engine.resize_kv(pages * page)
                    assert engine.stats().pages == pages

            found = await answers(engine, resize)
            stats = engine.stats()
            assert stats.preemptions > 3 and (stats.swaps > 3) is swaps
        return found

    assert anyio.run(run) == expected(PROMPTS)


@pytest.mark.parametrize("launch_ahead", [1, 3])
@pytest.mark.parametrize("swaps", [False, True])
def test_pages_go_and_come_back_while_requests_run(zoo: Zoo, device: str, launch_ahead: int, swaps: bool) -> None:
    check_resizing_under_load(zoo, device, launch_ahead, swaps)


def check_sleeping_under_load(zoo: Zoo, device: str, swaps: bool) -> None:
    """Assert that streams go on after sleeps of both levels."""
    folder = zoo.folder("exact")
    page = kv_bytes(folder, 1)

    async def run() -> list[list[int]]:
        options = {"kv_memory": 60 * page, "swap_memory": 400 * page if swaps else 0}
        async with open_engine(folder, device, **options) as engine:

            async def sleep() -> None:
                for level in (1, 2, 1):
                    await progress(engine, 60)
                    await engine.sleep(level)  # type: ignore[arg-type]
                    await engine.wake()
                await progress(engine, 60)
                await engine.sleep()
                await engine.sleep(2)
                await engine.resize_kv(100 * page)
                await engine.wake()

            return await answers(engine, sleep)

    assert anyio.run(run) == expected(PROMPTS)


@pytest.mark.parametrize("swaps", [False, True])
def test_streams_go_on_after_a_sleep(zoo: Zoo, device: str, swaps: bool) -> None:
    check_sleeping_under_load(zoo, device, swaps)


@pytest.mark.parametrize("level", [1, 2])
def test_a_sleep_gives_back_weights_and_pages_and_waking_needs_them(zoo: Zoo, cuda: str, level: Literal[1, 2]) -> None:
    folder = zoo.folder("exact")
    large = (2 << 30) // kv_bytes(folder, 1)

    async def run() -> list[list[int]]:
        async with open_engine(folder, cuda, kv_memory=2 << 30) as engine:

            async def sleep() -> None:
                await progress(engine, 100)
                before = used()
                await engine.sleep(level)
                assert before - used() >= large * kv_bytes(folder, 1) - SLACK
                with filled(leave=1 << 30):
                    with pytest.raises(DeviceUnavailable):
                        await engine.wake()
                    assert engine.sleep_level == level
                await engine.wake()
                assert abs(before - used()) <= SLACK

            return await answers(engine, sleep)

    assert anyio.run(run) == expected(PROMPTS)


def test_memory_that_is_given_back_is_there_for_others(zoo: Zoo, cuda: str) -> None:
    page = kv_bytes(zoo.folder("exact"), 1)
    large, small = (1 << 30) // page, 64

    async def run() -> list[list[int]]:
        async with open_engine(zoo.folder("exact"), cuda, kv_memory=large * page) as engine:

            async def resize() -> None:
                await progress(engine, 100)
                before = used()
                await engine.resize_kv(small * page)
                assert abs(before - used() - (large - small) * page) <= SLACK + (large * page) // 32
                await progress(engine, 100)
                await engine.resize_kv(large * page)
                assert abs(before - used()) <= SLACK

            return await answers(engine, resize)

    assert anyio.run(run) == expected(PROMPTS)
