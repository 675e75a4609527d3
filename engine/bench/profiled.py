"""`--profile`: runs a benchmark's work once more, and prints host time by part, loop lag and the GPU's time."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from statistics import median
from typing import Any

import anyio

from headrace.engine import Engine
from headrace.engine.bench.gpu_trace import GpuWindow, trace, warm_up
from headrace.engine.bench.opening import Subject
from headrace.engine.bench.profile import HostProfile, host_profile, watching
from headrace.engine.bench.report import percentile, table

__all__ = ["TICK", "WINDOW", "Lags", "lag_timer", "profile_work"]

TICK = 0.001
WINDOW = 0.6  # seconds

Lags = list[float]
"""Milliseconds by which each tick was late."""


@asynccontextmanager
async def lag_timer() -> AsyncIterator[Lags]:
    """Run a timer of one millisecond on the event loop while the block lasts, and give the list of its lags."""
    lags: Lags = []
    ticked = anyio.Event()

    async def tick() -> None:
        while True:
            started = time.perf_counter()
            await anyio.sleep(TICK)
            lags.append(1000 * (time.perf_counter() - started - TICK))
            ticked.set()

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(tick)
        yield lags
        await ticked.wait()
        tasks.cancel_scope.cancel()


async def profile_work(
    subject: Subject,
    work: Callable[[], Awaitable[object]],
    title: str,
    *,
    rows: int,
    traced: Callable[[], Awaitable[object]] | None = None,
) -> dict[str, Any]:
    """Run `work` once with the host timed and, on a GPU, once more with the GPU traced; print both.

    Args:
        subject: The engine.
        work: Function that runs the work.
        title: Title of the tables.
        rows: Requests of `work`; the GPU is traced when all of them decode.
        traced: A longer `work` for the GPU's trace, which takes `WINDOW` seconds.

    Returns:
        The printed figures for a JSON file: host times in microseconds, lag in milliseconds, GPU times in seconds.
    """
    with host_profile(subject.engine) as host:
        async with lag_timer() as lags:
            await work()
    on_gpu = subject.engine.info.device.startswith("cuda")
    window = await _traced(subject.engine, traced or work, rows) if on_gpu else None
    _print(title, host, lags, window)
    found: dict[str, Any] = {
        "host_us": {part: {"p50": 1e6 * middle, "p99": 1e6 * high} for part, middle, high in host.rows()},
        "loop_lag_ms": {"p50": median(lags), "p99": percentile(lags, 0.99)},
    }
    if window is not None:
        found["gpu"] = window._asdict()
    return found


async def _traced(engine: Engine, work: Callable[[], Awaitable[object]], rows: int) -> GpuWindow | None:
    """Run `work` over and over, and trace from the first step in which all rows decode."""
    warm_up()
    passes = 0

    async def repeat() -> None:
        nonlocal passes
        while True:
            await work()
            passes += 1

    with watching(engine, 0) as watch:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(repeat)
            full = False
            while not (full or passes):
                await anyio.sleep(TICK)
                full = bool(watch.commits) and watch.commits[-1].generated == rows
            window = await trace(WINDOW)
            tasks.cancel_scope.cancel()
    return window


def _print(title: str, host: HostProfile, lags: Lags, window: GpuWindow | None) -> None:
    rows = [[part, f"{1e6 * middle:.0f}", f"{1e6 * high:.0f}"] for part, middle, high in host.rows()]
    rows.append(["loop lag", f"{1000 * median(lags):.0f}", f"{1000 * percentile(lags, 0.99):.0f}"])
    table(f"{title}: host, µs a step over {len(host.steps)} steps", ("part", "median", "p99"), rows)
    if window is None:
        return
    shares = [
        [name, f"{1000 * seconds:.2f}", f"{seconds / window.seconds:.1%}"] for name, seconds in window.by_class.items()
    ]
    shares.append(["idle", f"{1000 * window.idle * window.seconds:.2f}", f"{window.idle:.1%}"])
    shares.append(
        ["of it between steps", f"{1000 * window.idle_between * window.seconds:.2f}", f"{window.idle_between:.1%}"]
    )
    table(f"{title}: GPU, {1000 * window.seconds:.0f} ms traced", ("class", "ms", "share"), shares)
