"""`headrace bench swap`: requests that do not all fit the pages, preempted by computing again and by swapping.

The real engine and its device are measured; prompts are random ids and seeded, weights may be random.
"""

from __future__ import annotations

import random
import time
from typing import Literal, NamedTuple, TypeAlias

import anyio

from headrace.engine import Engine, EngineStats, SamplingParams
from headrace.engine.bench.report import conditions, show
from headrace.engine.bench.shapes import located

__all__ = ["run"]

LoadFormat: TypeAlias = Literal["auto", "random"]

_SEED = 7


class _Run(NamedTuple):
    seconds: float
    tokens: list[list[int]]
    stats: EngineStats
    page_seconds: float
    token_seconds: float
    """Seconds of a prefilled token."""


def run(*, model: str, requests: int, prompt: int, output: int, swap_memory: str, json_path: str | None) -> None:
    """Measure `requests` requests on pages for all prompts and a quarter of the answers."""
    rows = []
    data: dict[str, object] = {"conditions": conditions(model=model, requests=requests, prompt=prompt, output=output)}
    outputs = []
    page_bytes = anyio.run(_page_bytes, model)
    for name, memory in (("computing again", "0"), ("swapping", swap_memory)):
        made = anyio.run(_run, model, requests, prompt, output, page_bytes, memory)
        outputs.append(made.tokens)
        figures = {
            "seconds": made.seconds,
            "preemptions": made.stats.preemptions,
            "swaps": made.stats.swaps,
            "page_microseconds": 1e6 * made.page_seconds,
            "prefilled_token_microseconds": 1e6 * made.token_seconds,
        }
        rows.append([name, *(f"{value:.3g}" for value in figures.values())])
        data[name] = figures
    same = sum(first == second for first, second in zip(*outputs, strict=True))
    data["equal_outputs"] = same
    columns = ("preemption by", "s", "preemptions", "swaps", "µs a page", "µs a prefilled token")
    title = f"{requests} requests on pages for their prompts and a quarter of their answers; {same} answers alike"
    show(title, columns, rows, data, json_path)


async def _run(model: str, requests: int, prompt: int, output: int, page_bytes: int, swap_memory: str) -> _Run:
    chance = random.Random(_SEED)
    with located(model) as (path, random_weights):
        load_format: LoadFormat = "random" if random_weights else "auto"
        memory = requests * -(-(prompt + output // 4) // 16) * page_bytes
        async with Engine(
            path, kv_memory=memory, swap_memory=swap_memory, prefix_cache=False, load_format=load_format
        ) as engine:
            vocabulary = engine.info.vocab_size
            prompts = [[chance.randrange(vocabulary) for _ in range(prompt)] for _ in range(requests)]
            params = SamplingParams(max_tokens=output, temperature=0, ignore_eos=True)
            await engine.generate(prompts[0], params)
            await engine.generate(prompts[1], params)
            started = time.perf_counter()
            made = await engine.generate_many(prompts, params)
            seconds = time.perf_counter() - started
            assert engine._life.loop is not None
            scheduler = engine._life.loop.scheduler
            pace = scheduler.swaps.host.page_seconds, scheduler.pace.token_seconds
            return _Run(seconds, [each.choices[0].token_ids for each in made], engine.stats(), *pace)


async def _page_bytes(model: str) -> int:
    with located(model) as (path, random_weights):
        load_format: LoadFormat = "random" if random_weights else "auto"
        async with Engine(path, max_context=64, max_rows=1, load_format=load_format) as engine:
            return engine.info.page_bytes
