"""`headrace bench serve MODEL`: requests that stream over loopback, as users of a server see them."""

from __future__ import annotations

import random
import time
from statistics import median
from typing import Any

import anyio

from headrace.engine.bench.report import conditions, percentile, show
from headrace.server.bench.client import Endpoint, Reading, stream
from headrace.server.bench.process import started

__all__ = ["run"]

_LARGEST_ID = 10_000


def run(
    model: str,
    *,
    options: dict[str, Any],
    requests: int,
    concurrency: int,
    prompt_tokens: int,
    output_tokens: int,
    json_path: str | None,
) -> None:
    """Load a server with `requests`, `concurrency` of them at a time, and print what its users see."""
    engine = {"model": model, **options}
    with started(engine, fake=False, connections=concurrency, max_queue=max(1024, concurrency)) as server:
        readings, seconds = anyio.run(_load, server.target, requests, concurrency, prompt_tokens, output_tokens)
        server.stop()
    failed = sum(not reading.done for reading in readings)
    firsts = [1000 * (reading.arrivals[0] - reading.began) for reading in readings if reading.done]
    gaps = [
        1000 * (later - earlier)
        for reading in readings
        for earlier, later in zip(reading.arrivals, reading.arrivals[1:], strict=False)
    ]
    if not firsts:
        raise RuntimeError(f"none of {requests} requests was answered")
    tokens = (requests - failed) * output_tokens
    figures = {
        "requests/s": (requests - failed) / seconds,
        "output tokens/s": tokens / seconds,
        **{f"time to first token p{share}, ms": percentile(firsts, share / 100) for share in (50, 90, 99)},
        **{f"time between events p{share}, ms": percentile(gaps, share / 100) for share in (50, 90, 99)},
        "request p50, s": median(reading.ended - reading.began for reading in readings),
        "failed": failed,
    }
    rows = [[name, f"{value:.2f}" if isinstance(value, float) else str(value)] for name, value in figures.items()]
    data = {
        "conditions": conditions(
            model=server.target.model,
            requests=requests,
            concurrency=concurrency,
            prompt_tokens=prompt_tokens,
            output_tokens=output_tokens,
        ),
        "figures": figures,
    }
    show("streams over loopback, client in a process of its own", ("", "value"), rows, data, json_path)


async def _load(
    target: Endpoint, requests: int, concurrency: int, prompt_tokens: int, output_tokens: int
) -> tuple[list[Reading], float]:
    generator = random.Random(0)
    readings = [Reading() for _ in range(requests)]
    await stream(target, _body(generator, prompt_tokens, output_tokens), Reading())  # warms up
    left = iter(readings)

    async def work() -> None:
        for reading in left:
            await stream(target, _body(generator, prompt_tokens, output_tokens), reading)

    began = time.perf_counter()
    async with anyio.create_task_group() as tasks:
        for _ in range(min(concurrency, requests)):
            tasks.start_soon(work)
    return readings, time.perf_counter() - began


def _body(generator: random.Random, prompt_tokens: int, output_tokens: int) -> dict[str, Any]:
    prompt = [generator.randrange(_LARGEST_ID) for _ in range(prompt_tokens)]
    return {"prompt": prompt, "max_tokens": output_tokens, "ignore_eos": True, "temperature": 0.6}
