"""`headrace bench lag`: measures how late the host application's own coroutines run while streams decode."""

from __future__ import annotations

import random
from statistics import median

import anyio

from headrace.engine import Engine, SamplingParams
from headrace.engine.bench.profiled import TICK, Lags, lag_timer
from headrace.engine.bench.report import conditions, percentile, show

__all__ = ["run"]

_PROMPT, _OUTPUT = 128, 128


def run(model: str, *, streams: int, json_path: str | None) -> None:
    """Measure with an idle engine, then with `streams` readers."""
    anyio.run(_run, model, streams, json_path)


async def _run(model: str, streams: int, json_path: str | None) -> None:
    generator = random.Random(0)
    async with Engine(model) as engine:
        prompts = [[generator.randrange(engine.info.vocab_size) for _ in range(_PROMPT)] for _ in range(streams)]
        await _lags(engine, prompts[:1])
        measured = {"idle": await _lags(engine, []), f"{streams} streams": await _lags(engine, prompts)}
        data = {
            "conditions": conditions(model=engine.info.model, streams=streams),
            "milliseconds": {
                name: {"p50": median(lags), "p99": percentile(lags, 0.99), "max": max(lags)}
                for name, lags in measured.items()
            },
        }
    rows = [
        [name, f"{median(lags):.2f}", f"{percentile(lags, 0.99):.2f}", f"{max(lags):.2f}"]
        for name, lags in measured.items()
    ]
    show(f"event-loop lag of a {1000 * TICK:.0f} ms timer, ms", ("while", "p50", "p99", "max"), rows, data, json_path)


async def _lags(engine: Engine, prompts: list[list[int]]) -> Lags:
    """Return the milliseconds by which a timer was late while `prompts` were answered, or for two seconds."""
    async with lag_timer() as lags:
        if not prompts:
            await anyio.sleep(2.0)
        async with anyio.create_task_group() as readers:
            for prompt in prompts:
                readers.start_soon(_read, engine, prompt)
    return lags


async def _read(engine: Engine, prompt: list[int]) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=_OUTPUT, ignore_eos=True)
    async for _ in engine.stream(prompt, params):
        pass
