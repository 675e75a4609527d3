"""`headrace bench lora`: what adapters cost - a decode step's time, slots too few for the traffic, loading meanwhile.

Adapters are invented, all with the same weights and each with a digest of its own, so that no disk is measured. The
floor of a step is the base's own time and that in which the bytes of the adapters in it can be read.
"""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from pathlib import Path
from statistics import median
from typing import Any

import anyio
import torch

from headrace.adapters.bank import AdapterDevice
from headrace.adapters.layout import MODULES, BlockLayout
from headrace.adapters.loaded import LoadedAdapter
from headrace.engine import Engine, SamplingParams
from headrace.engine.bench.opening import BenchmarkFailed, Subject, Target, opened, require_room
from headrace.engine.bench.profile import steady_intervals, watching
from headrace.engine.bench.report import percentile, show, table
from headrace.engine.bench.shapes import spec_of
from headrace.engine.bench.workload import random_prompts
from headrace.engine.model.adapter_device import adapter_shape
from headrace.engine.opened import Opened

__all__ = ["Sizes", "run"]

_SKIP = 16  # steps after the last prefill before intervals count
_REPEATS = 3
_LOADS = 100
_SMALL = ("q", "k", "v", "o")


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """What is measured."""

    batches: Sequence[int]
    context: int
    """Tokens of a row when its steps begin to count."""
    steps: int
    slots: int
    registered: int
    """Adapters among which traffic chooses."""
    rank: int
    small: bool
    """Updates of q, k, v and o alone, not of every module."""


def run(target: Target, sizes: Sizes, json_path: str | None) -> None:
    """Measure and print.

    Raises:
        BenchmarkFailed: The engine has no room for what was asked.
    """
    anyio.run(_run, target, sizes, json_path)


async def _run(target: Target, sizes: Sizes, json_path: str | None) -> None:
    most = max(sizes.batches)
    count = max(sizes.registered, most)
    options = {"adapter_slots": str(max(sizes.slots, most)), "max_adapters": str(count + _LOADS)}
    target = replace(target, more={"max_adapter_rank": "256", **options, **target.more})

    def invent(path: str, found: Opened) -> Opened:
        return replace(found, adapters=_invented(path, found, sizes))

    async with opened(target, rows=most, change=invent) as subject:
        engine = subject.engine
        require_room(engine, [sizes.context + 2 * _SKIP + sizes.steps + most] * most)
        for number in range(count):
            await engine.adapters.load(f"a{number}", str(number))
        nbytes = engine.adapters.list()[0].nbytes
        figures = [await _batch(subject, sizes, batch, nbytes) for batch in sizes.batches]
        traffic = await _traffic(engine, sizes, most)
        loading = await _loading(engine, sizes, most, count)
        asked = {"rank": sizes.rank, "adapter_bytes": nbytes, "context": sizes.context, "slots": sizes.slots}
        data = {
            "conditions": subject.conditions(target, **asked),
            "decode": figures,
            "traffic": traffic,
            "loading": loading,
        }
        rows = [_row(figure, case) for figure in figures for case in figure["cases"]]
        show("decode step with adapters", _COLUMNS, rows, data, json_path)
        few, many = f"Zipf over {sizes.slots}", f"Zipf over {count}"
        rates = [f"{traffic[name]:,.0f} tok/s" for name in ("few", "many")]
        p99 = [f"{loading[name]:.2f} ms" for name in ("alone", "loading")]
        lines = [[few, rates[0]], [many, rates[1]], ["step p99 alone", p99[0]], [f"with {_LOADS} loads", p99[1]]]
        table("traffic and loading", ("what", "figure"), lines)


def _invented(path: str, found: Opened, sizes: Sizes) -> AdapterDevice:
    """A device whose folders hold invented weights."""
    device = found.adapters
    if device is None:
        raise BenchmarkFailed("this device takes no adapters")
    shape = adapter_shape(spec_of(path))
    modules = _SMALL if sizes.small else MODULES
    layout = BlockLayout.of(shape, {(layer, name): sizes.rank for layer in range(shape.num_layers) for name in modules})
    dtype = torch.float32 if found.info.device == "cpu" else getattr(torch, found.info.dtype)
    pinned = found.info.device.startswith("cuda")
    block = torch.empty(layout.elements, dtype=dtype, pin_memory=pinned).normal_(0.0, 0.01)

    def read(folder: str, root: Path | None) -> LoadedAdapter:
        return LoadedAdapter(layout, block, None, None, folder.encode())

    return replace(device, read=read)


async def _batch(subject: Subject, sizes: Sizes, batch: int, nbytes: int) -> dict[str, Any]:
    """Steps of one batch with none, one, eight and as many different adapters as rows, in turn."""
    engine = subject.engine
    counts = sorted({0, 1, min(8, batch), batch})
    medians: dict[int, list[float]] = {count: [] for count in counts}
    for turn in range(_REPEATS + 1):
        for count in counts:
            worn = [f"a{row % count}" if count else None for row in range(batch)]
            prompts = random_prompts(batch, sizes.context, vocab_size=engine.info.vocab_size, seed=turn * 9999 + count)
            intervals = await _steps(engine, prompts, worn, sizes.steps)
            if turn:
                medians[count].append(1000 * median(intervals))
    base = median(medians[0])
    cases = [
        {
            "adapters": count,
            "ms": median(medians[count]),
            "floor_ms": base + 1000 * count * nbytes / subject.speed.bytes_per_second,
        }
        for count in counts
    ]
    return {"batch": batch, "cases": cases}


async def _steps(engine: Engine, prompts: Sequence[list[int]], worn: Sequence[str | None], steps: int) -> list[float]:
    """Seconds of each step in which all rows decode."""
    with watching(engine, 0) as watch:
        joining = -(-sum(map(len, prompts)) // max(1, engine.info.max_batched_tokens - len(prompts)))
        await _generate(engine, prompts, worn, joining + _SKIP + steps)
    intervals = steady_intervals(watch.commits, len(prompts), _SKIP)
    if len(intervals) < steps // 2:
        raise BenchmarkFailed(f"only {len(intervals)} of {steps} steps had all {len(prompts)} rows decoding")
    return intervals[:steps]


async def _generate(engine: Engine, prompts: Sequence[list[int]], worn: Sequence[str | None], tokens: int) -> None:
    params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)

    async def one(prompt: list[int], adapter: str | None) -> None:
        await engine.generate(prompt, params, adapter=adapter)

    async with anyio.create_task_group() as tasks:
        for prompt, adapter in zip(prompts, worn, strict=True):
            tasks.start_soon(one, prompt, adapter)


async def _traffic(engine: Engine, sizes: Sizes, rows: int) -> dict[str, float]:
    """Tokens a second where adapters follow Zipf's law, over as many as there are slots and over all."""
    rates = {}
    for name, count in (("few", sizes.slots), ("many", max(sizes.registered, rows))):
        drawn = random.Random(1)
        weights = list(accumulate(1 / (rank + 1) for rank in range(count)))
        worn = [f"a{number}" for number in drawn.choices(range(count), cum_weights=weights, k=4 * rows)]
        prompts = random_prompts(len(worn), 32, vocab_size=engine.info.vocab_size, seed=count)
        started = time.perf_counter()
        await _generate(engine, prompts, worn, sizes.steps)
        rates[name] = len(worn) * sizes.steps / (time.perf_counter() - started)
    return rates


async def _loading(engine: Engine, sizes: Sizes, rows: int, first: int) -> dict[str, float]:
    """99th percentile of a step's milliseconds while rows decode, alone and while adapters load."""
    found = {}
    for name in ("alone", "loading"):
        prompts = random_prompts(rows, 32, vocab_size=engine.info.vocab_size, seed=len(name))
        intervals: list[float] = []

        async def measure(prompts: list[list[int]] = prompts, intervals: list[float] = intervals) -> None:
            intervals += await _steps(engine, prompts, ["a0"] * rows, 2 * sizes.steps)

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(measure)
            for number in range(_LOADS if name == "loading" else 0):
                await engine.adapters.load(f"a{first + number}", f"more {number}")
        found[name] = 1000 * percentile(intervals, 0.99)
    return found


_COLUMNS = ("batch", "adapters", "ms", "over none", "floor over none")


def _row(figure: dict[str, Any], case: dict[str, Any]) -> list[str]:
    base = figure["cases"][0]["ms"]
    return [
        str(figure["batch"]),
        str(case["adapters"]),
        f"{case['ms']:.3f}",
        f"{100 * (case['ms'] / base - 1):+.1f} %",
        f"{100 * (case['floor_ms'] / base - 1):+.1f} %",
    ]
