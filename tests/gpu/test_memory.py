"""Device memory comes back when an engine closes or fails to open, and two engines on one device do not meet.

`HEADRACE_REOPEN` is how often an engine is opened and closed, 50 by default.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import anyio
import pytest
import torch
from gpu.checkpoints import kv_bytes
from gpu.conftest import Zoo
from gpu.driving import at_rest, draw, greedy, open_engine, together
from gpu.judge import Output
from leftovers import Threads

from headrace.engine import Engine, InvalidParams, LoadFailed, OutOfMemory

REOPEN = int(os.environ.get("HEADRACE_REOPEN", "50"))
MB = 1 << 20
SLACK = 64 * MB
PROMPTS = [draw(length, length) for length in (3, 20, 70, 130)]


def used() -> int:
    """Bytes of the GPU that are taken, by whomever."""
    free, total = torch.cuda.mem_get_info()
    return total - free


def settled() -> int:
    """The same once this process has given back what it holds for nothing."""
    gc.collect()
    torch.cuda.empty_cache()
    return used()


@contextmanager
def filled(leave: int) -> Iterator[None]:
    """Take all of the GPU's memory but so many bytes."""
    settled()
    blocks, size = [], 8 << 30
    try:
        while (free := torch.cuda.mem_get_info()[0] - leave) > 8 * MB < size:
            try:
                blocks.append(torch.empty(min(free, size), dtype=torch.uint8, device="cuda"))
            except torch.OutOfMemoryError:  # what is free need not be in one piece
                size = min(free, size) // 2
        yield
    finally:
        blocks.clear()
        torch.cuda.empty_cache()


async def serve(folder: Path, device: str, **options: object) -> list[Output]:
    """Open, answer, close."""
    async with open_engine(folder, device, max_context=256, **options) as engine:
        outputs = await together(engine, PROMPTS, greedy(8))
        await at_rest(engine)
    return outputs


def test_closing_returns_the_memory_every_time(zoo: Zoo, device: str) -> None:
    """Threads are counted on any device, memory on a GPU."""
    folder = zoo.folder("llama 3")
    options = {"max_rows": 4, "kv_memory": "256MiB"}
    anyio.run(lambda: serve(folder, device, **options))
    threads = Threads()
    first = used() if device == "cuda" else 0
    levels, answers = [], []
    for _ in range(REOPEN):
        outputs = anyio.run(lambda: serve(folder, device, **options))
        answers += outputs
        levels.append(used() - first if device == "cuda" else 0)
        threads.check_ended()
    assert max(map(abs, levels)) <= SLACK, f"MB over the first close: {[level // MB for level in levels]}"
    zoo.judge("llama 3").check(answers, "after many openings")


def test_an_engine_takes_what_it_says(zoo: Zoo, cuda: str) -> None:
    """Nearly all it takes is keys, values and a bounded rest: no second copy of either."""
    folder = zoo.folder("llama 3")

    async def level(size: int) -> int:
        async with open_engine(folder, cuda, max_context=256, max_rows=4, kv_memory=size) as engine:
            await together(engine, PROMPTS, greedy(4))
            return used()

    anyio.run(level, 64 * MB)
    small, large = (anyio.run(level, size) for size in (64 * MB, 2048 * MB))
    assert abs((large - small) - (2048 - 64) * MB) <= 2 * SLACK


def test_two_engines_share_the_device(zoo: Zoo, device: str) -> None:
    """Other models, other sizes, at once and in turn: each gives right tokens, and one outlives the other."""
    small = kv_bytes(zoo.folder("qwen3"), 40)

    async def run() -> tuple[list[Output], list[Output], list[Output]]:
        async with open_engine(zoo.folder("llama 3"), device, max_context=256) as one:
            async with open_engine(zoo.folder("qwen3"), device, max_context=256, kv_memory=small, max_rows=3) as other:
                found: dict[str, list[Output]] = {}

                async def ask(name: str, engine: Engine) -> None:
                    found[name] = await together(engine, PROMPTS, greedy(32))

                async with anyio.create_task_group() as tasks:
                    tasks.start_soon(ask, "one", one)
                    tasks.start_soon(ask, "other", other)
                await at_rest(other)
            after = await together(one, [[*ids, 9] for ids in PROMPTS], greedy(16))
            await at_rest(one)
        return found["one"], found["other"], after

    first, second, after = anyio.run(run)
    zoo.judge("llama 3").check(first + after, "one of two engines")
    zoo.judge("qwen3").check(second, "the other of two engines")


def test_two_engines_of_one_model_give_the_tokens_they_give_alone(zoo: Zoo, device: str) -> None:
    folder = zoo.folder("exact")

    async def both() -> list[list[Output]]:
        found: list[list[Output]] = [[], []]

        async def one(index: int) -> None:
            found[index] = await serve(folder, device)

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(one, 0)
            tasks.start_soon(one, 1)
        return found

    alone = anyio.run(lambda: serve(folder, device))
    assert anyio.run(both) == [alone, alone]


def refused(folder: Path, device: str, **options: object) -> Exception:
    with pytest.raises((LoadFailed, InvalidParams)) as caught:
        anyio.run(lambda: serve(folder, device, **options))
    return caught.value


def test_kv_memory_that_the_device_lacks_is_refused_and_nothing_stays(zoo: Zoo, cuda: str) -> None:
    folder = zoo.folder("llama 3")
    anyio.run(lambda: serve(folder, cuda))
    first, threads = settled(), Threads()
    total = torch.cuda.mem_get_info()[1]
    for size in (total + (1 << 30), 2**60):
        error = refused(folder, cuda, kv_memory=size)
        assert "memory" in str(error).lower()
        assert error.__traceback__ is not None
        del error
        assert used() - first <= SLACK
        threads.check_ended()
    refused(folder, cuda, kv_memory=1)
    anyio.run(lambda: serve(folder, cuda))
    assert settled() - first <= SLACK


def test_a_full_device_refuses_an_engine_and_serves_it_later(zoo: Zoo, cuda: str) -> None:
    folder = zoo.folder("llama 3")
    anyio.run(lambda: serve(folder, cuda))
    first, threads = settled(), Threads()
    with filled(leave=512 * MB):
        before = used()
        refused(folder, cuda, kv_memory=2 << 30)
        assert used() - before <= SLACK
        threads.check_ended()
    outputs = anyio.run(lambda: serve(folder, cuda))
    zoo.judge("llama 3").check(outputs, "after a refusal")
    assert settled() - first <= 2 * SLACK  # the judge's own tensors came in between


def test_a_device_that_fills_up_under_an_open_engine_fails_requests_at_most(zoo: Zoo, cuda: str) -> None:
    """Steps may need no memory at all; where one does, its requests get `OutOfMemory`, and the engine serves on."""
    folder = zoo.folder("llama 3")

    async def run() -> list[Output]:
        async with open_engine(folder, cuda, max_context=256) as engine:
            await together(engine, PROMPTS[:1], greedy(4))
            with filled(leave=0):
                for prompt in PROMPTS[1:]:
                    try:
                        await engine.generate(prompt, greedy(8))
                    except OutOfMemory:
                        continue
            outputs = await together(engine, PROMPTS, greedy(8))
            await at_rest(engine)
        return outputs

    zoo.judge("llama 3").check(anyio.run(run), "after memory came back")
