"""`headrace bench serve --fake-device`: measures the load that the server alone can carry, one run a figure."""

from __future__ import annotations

import random
import time
from collections.abc import Awaitable, Callable
from functools import partial
from importlib.util import find_spec
from statistics import median
from typing import Any, TypeVar

import anyio

from headrace.engine.bench.report import conditions, percentile, show
from headrace.server.bench.client import Endpoint, Reading, get, stream
from headrace.server.bench.process import cpu_seconds, resident_mb, started

__all__ = ["SCENARIOS", "run"]

T = TypeVar("T")
Figures = dict[str, float | int | str]

_STREAMS = 1000
_STEP_SECONDS = 5.0  # a step while streams are idle
_EVERY = 0.1  # seconds between control requests
_ENDLESS = {"prompt": "a fake prompt", "ignore_eos": True, "max_tokens": 10**6}
_PACED = 100_000  # events a second: no pacing


def run(names: list[str], *, seconds: float, scale: float, json_path: str | None) -> None:
    """Run the scenarios in `names`, each `seconds` long and with `scale` times the load."""
    figures: dict[str, Figures] = {}
    for name in names:
        figures[name] = SCENARIOS[name](seconds, scale)
    rows = [
        [name, key, f"{value:.1f}" if isinstance(value, float) else str(value)]
        for name, found in figures.items()
        for key, value in found.items()
    ]
    data = {"conditions": conditions(device="fake", seconds=seconds, scale=scale), "figures": figures}
    show("the server over a device that only takes time", ("scenario", "", "value"), rows, data, json_path)


def idle(seconds: float, scale: float) -> Figures:
    """Measure the memory of many open streams with a token every few seconds, and control requests meanwhile."""
    count = int(10_000 * scale)
    device = {"max_rows": count, "max_context": 4096, "num_pages": 4 * count, "step_seconds": _STEP_SECONDS}
    device["max_batched_tokens"] = 16 * count  # prompts find room beside everybody's next token
    with started(device, fake=True, connections=count, max_queue=count, queue_timeout=600) as server:
        target = server.target

        async def main() -> Figures:
            await get(target, "/health/ready")
            before = resident_mb(target)
            async with anyio.create_task_group() as tasks:
                readings = await _open(tasks.start_soon, target, count, _ENDLESS | {"max_tokens": 4000})
                latencies = await _controls(target, seconds)
                after = resident_mb(target)
                tasks.cancel_scope.cancel()
            return {
                "streams with their first token": sum(bool(reading.events) for reading in readings),
                "memory of the idle server, MB": before,
                "more with the streams, MB": after - before,
                **_latency(latencies),
            }

        return _with_end(_run(main), server.stop())


def events(seconds: float, scale: float) -> Figures:
    """Measure 20,000 events a second, one token each."""
    return _rate(seconds, 20_000 * scale, max_events_per_second=_PACED)


def half_events(seconds: float, scale: float) -> Figures:
    """Measure control requests beside 10,000 events a second."""
    return _rate(seconds, 10_000 * scale, max_events_per_second=_PACED)


def tokens(seconds: float, scale: float) -> Figures:
    """Measure 100,000 tokens a second, merged into fewer events."""
    return _rate(seconds, 100_000 * scale)


def half_tokens(seconds: float, scale: float) -> Figures:
    """Measure control requests beside 50,000 tokens a second."""
    return _rate(seconds, 50_000 * scale)


def _rate(seconds: float, tokens_per_second: float, **settings: Any) -> Figures:
    device = {
        "max_rows": _STREAMS,
        "max_context": 200_000,
        "num_pages": 1_000_000,
        "step_seconds": _STREAMS / tokens_per_second,
        "prefix_cache": False,
    }
    with started(device, fake=True, connections=_STREAMS, **settings) as server:
        target = server.target

        async def main() -> Figures:
            async with anyio.create_task_group() as tasks:
                readings = await _open(tasks.start_soon, target, _STREAMS, _ENDLESS | {"max_tokens": 190_000})
                before, memory = _sums(readings), resident_mb(target)
                began = time.perf_counter()
                worked = cpu_seconds(target)
                latencies = await _controls(target, seconds)
                took = time.perf_counter() - began
                worked = cpu_seconds(target) - worked
                after, grown = _sums(readings), resident_mb(target) - memory
                tasks.cancel_scope.cancel()
            count, size = after[0] - before[0], after[1] - before[1]
            return {
                "events/s": count / took,
                "tokens/s": size / took,
                "CPU of the server, %": 100 * worked / took,
                "memory growth, MB": grown,
                **_latency(latencies),
            }

        return _with_end(_run(main), server.stop())


def overload(seconds: float, scale: float) -> Figures:
    """Send three times the requests that the device can answer; count the answers and time the refusals."""
    rows, output = max(8, int(64 * scale)), 32
    device = {"max_rows": rows, "step_seconds": 0.02, "max_context": 1024}
    rate = rows / (output * 0.02)
    figures: Figures = {}
    with started(device, fake=True, connections=4096, max_queue=2 * rows) as server:
        target = server.target

        async def main() -> None:
            memory = 0.0
            for name, factor in (("peak", 1.0), ("3 times", 3.0)):
                memory = resident_mb(target)
                readings = await _arrivals(target, factor * rate, seconds, output)
                end = readings[0].began + seconds
                figures[f"answered/s at {name}"] = sum(each.done and each.ended < end for each in readings) / seconds
                refused = [1000 * (each.ended - each.began) for each in readings if each.status not in (0, 200)]
                if refused:
                    figures[f"refused at {name}"] = len(refused)
                    figures["refused after p99, ms"] = percentile(refused, 0.99)
                    figures["refused after at most, ms"] = max(refused)
            figures["memory growth at 3 times, MB"] = resident_mb(target) - memory

        _run(main)
        return _with_end(figures, server.stop())


def disconnects(seconds: float, scale: float) -> Figures:
    """Let clients disconnect at random moments, and count what the server holds of them afterwards."""
    count, at_once = int(10_000 * scale), 200
    generator = random.Random(0)
    device = {"max_rows": 128, "step_seconds": 0.002, "max_context": 1024}
    with started(device, fake=True, connections=2 * at_once) as server:
        target = server.target

        async def main() -> Figures:
            left = iter(range(count))

            async def work() -> None:
                for _ in left:
                    body = {"prompt": "x" * generator.randrange(1, 400), "max_tokens": 500, "ignore_eos": True}
                    await stream(target, body, Reading(), stop_after=generator.uniform(0.0, 0.3), keep_times=False)

            async with anyio.create_task_group() as tasks:
                for _ in range(at_once):
                    tasks.start_soon(work)
            return {"disconnects": count}

        return _with_end(_run(main), server.stop())


SCENARIOS: dict[str, Callable[[float, float], Figures]] = {
    "idle": idle,
    "events": events,
    "events-half": half_events,
    "tokens": tokens,
    "tokens-half": half_tokens,
    "overload": overload,
    "disconnects": disconnects,
}


async def _open(
    start: Callable[..., object], target: Endpoint, count: int, body: dict[str, Any], at_once: int = 200
) -> list[Reading]:
    """Open streams, `at_once` of them every 20 ms; return when each has had two events, or after two minutes."""
    readings = [Reading() for _ in range(count)]

    for place, reading in enumerate(readings):
        start(partial(stream, target, body, reading, keep_times=False))
        if place % at_once == at_once - 1:
            await anyio.sleep(0.02)
    with anyio.move_on_after(120):
        while not all(reading.events > 1 for reading in readings):  # noqa: ASYNC110 - readings have no event
            await anyio.sleep(0.1)
    return readings


async def _controls(target: Endpoint, seconds: float) -> list[float]:
    """Send a control request every tenth of a second, and return the milliseconds that each took."""
    found: list[float] = []
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        found.append(1000 * await get(target, "/health/ready"))
        await anyio.sleep(_EVERY)
    return found


async def _arrivals(target: Endpoint, rate: float, seconds: float, output: int) -> list[Reading]:
    """Send `rate` requests a second, whatever becomes of them, and return their readings."""
    readings: list[Reading] = []
    body = {"prompt": "a fake prompt", "max_tokens": output, "ignore_eos": True}

    began = time.perf_counter()
    async with anyio.create_task_group() as tasks:
        while (now := time.perf_counter() - began) < seconds:
            while len(readings) < now * rate:
                readings.append(Reading())
                tasks.start_soon(partial(stream, target, body, readings[-1], keep_times=False))
            await anyio.sleep(0.005)
    return readings


def _sums(readings: list[Reading]) -> tuple[int, int]:
    return sum(reading.events for reading in readings), sum(reading.fake_tokens for reading in readings)


def _run(main: Callable[[], Awaitable[T]]) -> T:
    return anyio.run(main, backend_options={"use_uvloop": find_spec("uvloop") is not None})


def _latency(milliseconds: list[float]) -> Figures:
    return {
        "control request p50, ms": median(milliseconds),
        "control request p99, ms": percentile(milliseconds, 0.99),
    }


def _with_end(figures: Figures, held: dict[str, Any]) -> Figures:
    return figures | {"pages held at the end": held["pages_held"], "requests left at the end": held["live"]}
