"""`headrace bench lora`: the cost of adapters: steps, prompts, slots too few for the traffic, loading meanwhile.

Adapters are invented, each with a digest of its own. Adapters that are loaded while rows decode are read from a file in
the page cache; the others have no file. The floor of a step is the time of the step without adapters, and the time to
read the bytes of the adapters in it.
"""

from __future__ import annotations

import random
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from pathlib import Path
from statistics import median
from typing import Any

import anyio
import torch

from headrace.adapters.layout import MODULES, BlockLayout
from headrace.adapters.slots import Residency
from headrace.engine import Engine, SamplingParams
from headrace.engine.bench.engine.lora_files import FROM_FILE, invented, write_adapter
from headrace.engine.bench.opening import BenchmarkFailed, Subject, Target, opened, require_room
from headrace.engine.bench.profile import steady_intervals, watching
from headrace.engine.bench.report import percentile, show, table
from headrace.engine.bench.shapes import located, spec_of
from headrace.engine.bench.workload import random_prompts
from headrace.engine.life.opened import Opened
from headrace.engine.model.shared.adapter_device import adapter_shape

__all__ = ["Sizes", "run"]

_SKIP = 16  # steps after the last prefill before intervals count
_REPEATS = 3
_LOADS = 100
_FILLING = 16
_READIES = 10
_TRAFFIC = 8  # requests a row
_HOST_ADAPTERS = 8  # so few in host memory that others have to be read again
_SMALL = ("q", "k", "v", "o")


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """The sizes of a measurement."""

    batches: Sequence[int]
    context: int
    """Tokens of a row when its steps begin to count."""
    steps: int
    slots: int
    registered: int
    """Adapters among which traffic chooses."""
    rank: int
    small: bool
    """Whether adapters update q, k, v and o alone, and not every module."""

    @property
    def adapters(self) -> int:
        """Number of adapters that are registered: no fewer than slots and rows."""
        return max(self.registered, self.slots, *self.batches)


def run(target: Target, sizes: Sizes, json_path: str | None) -> None:
    """Measure, print and save the figures.

    Raises:
        BenchmarkFailed: The engine has no room for what was asked.
    """
    anyio.run(_run, target, sizes, json_path)


async def _run(target: Target, sizes: Sizes, json_path: str | None) -> None:
    disabled = await _disabled(target, sizes)
    data = await _enabled(target, sizes)
    off = [[str(batch), "disabled", f"{ms:.3f}", "", ""] for batch, ms in disabled.items()]
    cases = [_row(figure, case) for figure in data["decode"] for case in figure["cases"]]
    show("decode step with adapters", _COLUMNS, [*off, *cases], data | {"disabled_ms": disabled}, json_path)
    table("prompts, traffic and loading", ("what", "figure"), _lines(data, sizes))


async def _disabled(target: Target, sizes: Sizes) -> dict[int, float]:
    """Return the milliseconds of a step of each batch, in an engine that takes no adapters."""
    async with opened(target, rows=max(sizes.batches)) as subject:
        return {batch: (await _medians(subject.engine, sizes, batch, [0]))[0] for batch in sizes.batches}


async def _enabled(target: Target, sizes: Sizes) -> dict[str, Any]:
    """Return the figures of an engine that takes adapters, and its conditions."""
    most, count = max(sizes.batches), sizes.adapters
    modules = _SMALL if sizes.small else MODULES
    with located(target.model) as (path, _), tempfile.TemporaryDirectory() as folder:
        shape = adapter_shape(spec_of(path))
        if shape.latents is not None:
            raise BenchmarkFailed("adapters of latent attention are not measured: choose another model")
        ranks = {(layer, name): sizes.rank for layer in range(shape.num_layers) for name in modules}
        layout, written = BlockLayout.of(shape, ranks), Path(folder) / "adapter"

        def invent(_: str, found: Opened) -> Opened:
            if found.adapters is None:
                raise BenchmarkFailed("this device takes no adapters")
            stored: torch.dtype = getattr(torch, found.info.dtype)
            dtype, pinned = (torch.float32, False) if found.info.device == "cpu" else (stored, True)
            block = torch.empty(layout.elements, dtype=dtype, pin_memory=pinned).normal_(0.0, 0.01)
            write_adapter(written, shape, modules, sizes.rank, stored)
            return replace(found, adapters=invented(found.adapters, layout, block, written))

        more = {
            "max_adapter_rank": "256",
            "adapter_slots": str(max(sizes.slots, most)),
            "max_adapters": str(count + _FILLING + _LOADS),
            "adapter_host_memory": str(_HOST_ADAPTERS * 2 * layout.elements),
        }
        async with opened(replace(target, more=more | dict(target.more)), rows=most, change=invent) as subject:
            engine = subject.engine
            require_room(engine, [sizes.context + 2 * _SKIP + sizes.steps + most] * most)
            for number in range(count):
                await engine.adapters.load(f"a{number}", str(number))
            nbytes = engine.adapters.list()[0].nbytes
            asked = {"rank": sizes.rank, "adapter_bytes": nbytes, "context": sizes.context, "slots": sizes.slots}
            return {
                "conditions": subject.conditions(target, **asked),
                "decode": [await _batch(subject, sizes, batch, nbytes) for batch in sizes.batches],
                "prompts": await _prompts(engine, sizes, most),
                "traffic": await _traffic(engine, sizes, most),
                "loading": await _loading(engine, sizes, most),
                "ready": await _ready(engine),
            }


async def _batch(subject: Subject, sizes: Sizes, batch: int, nbytes: int) -> dict[str, Any]:
    """Measure steps of one batch with none, one, eight and as many different adapters as rows, in turn."""
    medians = await _medians(subject.engine, sizes, batch, sorted({0, 1, min(8, batch), batch}))
    floors = {count: medians[0] + 1000 * count * nbytes / subject.speed.bytes_per_second for count in medians}
    cases = [{"adapters": count, "ms": ms, "floor_ms": floors[count]} for count, ms in medians.items()]
    return {"batch": batch, "cases": cases}


async def _medians(engine: Engine, sizes: Sizes, batch: int, counts: Sequence[int]) -> dict[int, float]:
    """Return the milliseconds of a step with each number of different adapters."""
    medians: dict[int, list[float]] = {count: [] for count in counts}
    for turn in range(_REPEATS + 1):
        for count in counts:
            prompts = random_prompts(batch, sizes.context, vocab_size=engine.info.vocab_size, seed=turn * 9999 + count)
            intervals = await _steps(engine, prompts, _in_turn(count, batch), sizes.steps)
            if turn:
                medians[count].append(1000 * median(intervals))
    return {count: median(each) for count, each in medians.items()}


def _in_turn(count: int, rows: int) -> list[str | None]:
    """Return the adapter of each row, if rows use `count` adapters in turn."""
    return [f"a{row % count}" if count else None for row in range(rows)]


async def _steps(engine: Engine, prompts: Sequence[list[int]], names: Sequence[str | None], steps: int) -> list[float]:
    """Return the seconds of each step in which all rows decode; `names` has the adapter of each row."""
    with watching(engine, 0) as watch:
        joining = -(-sum(map(len, prompts)) // max(1, engine.info.max_batched_tokens - len(prompts)))
        await _generate(engine, prompts, names, joining + _SKIP + steps)
    intervals = steady_intervals(watch.commits, len(prompts), _SKIP)
    if len(intervals) < steps // 2:
        raise BenchmarkFailed(f"only {len(intervals)} of {steps} steps had all {len(prompts)} rows decoding")
    return intervals[:steps]


async def _generate(
    engine: Engine, prompts: Sequence[list[int]], names: Sequence[str | None], tokens: int | Sequence[int]
) -> None:
    lengths = [tokens] * len(prompts) if isinstance(tokens, int) else tokens

    async def one(prompt: list[int], adapter: str | None, length: int) -> None:
        params = SamplingParams(temperature=0, max_tokens=length, ignore_eos=True)
        await engine.generate(prompt, params, adapter=adapter)

    async with anyio.create_task_group() as tasks:
        for prompt, adapter, length in zip(prompts, names, lengths, strict=True):
            tasks.start_soon(one, prompt, adapter, length)


async def _traffic(engine: Engine, sizes: Sizes, rows: int) -> dict[str, float]:
    """Return the tokens a second where adapters follow Zipf's law, over as many as there are slots and over all.

    The requests differ in their adapters, and in their lengths, so that they end one by one.
    """
    rates = {}
    for name, count in (("few", sizes.slots), ("many", sizes.adapters)):
        weights = list(accumulate(1 / (rank + 1) for rank in range(count)))
        for part, requests in enumerate((2 * rows, _TRAFFIC * rows)):  # the first captures all graphs
            drawn = random.Random(part)
            names = [f"a{number}" for number in drawn.choices(range(count), cum_weights=weights, k=requests)]
            lengths = [drawn.randint(sizes.steps // 2, 2 * sizes.steps) for _ in names]
            prompts = random_prompts(requests, 32, vocab_size=engine.info.vocab_size, seed=2 * count + part)
            started = time.perf_counter()
            await _generate(engine, prompts, names, lengths)
            rates[name] = sum(lengths) / (time.perf_counter() - started)
    return rates


async def _prompts(engine: Engine, sizes: Sizes, rows: int) -> dict[int, float]:
    """Return the tokens a second of prompts with no, one and as many different adapters as there are prompts."""
    rates = {}
    for count in sorted({0, 1, rows}):
        seconds = []
        for turn in range(_REPEATS):
            prompts = random_prompts(
                rows, sizes.context, vocab_size=engine.info.vocab_size, seed=777 + turn + 9 * count
            )
            started = time.perf_counter()
            await _generate(engine, prompts, _in_turn(count, rows), 1)
            seconds.append(time.perf_counter() - started)
        rates[count] = rows * sizes.context / median(seconds[1:] or seconds)
    return rates


async def _loading(engine: Engine, sizes: Sizes, rows: int) -> dict[str, float]:
    """Return the 99th percentile of a step's milliseconds: alone, and while adapters are read and put in place.

    "filling" is the first few loads, while host memory still has room. "again" repeats "alone", to show how much two
    measurements of the same differ.
    """
    found: dict[str, float] = {}
    turns, first = 1, 0
    for name, loads in (("filling", _FILLING), ("loading", _LOADS), ("alone", 0), ("again", 0)):
        intervals: list[float] = []
        async with anyio.create_task_group() as tasks:
            loaded = anyio.Event()
            tasks.start_soon(_load, engine, range(first, first + loads), loaded)
            turn = 0
            while turn < turns or not loaded.is_set():
                prompts = random_prompts(rows, 32, vocab_size=engine.info.vocab_size, seed=100 * len(found) + turn)
                intervals += await _steps(engine, prompts, ["a0"] * rows, 4 * sizes.steps)
                turn += 1
        first += loads
        turns = min(turn, _REPEATS)
        found[name] = 1000 * percentile(intervals, 0.99)
    return found


async def _load(engine: Engine, numbers: Sequence[int], loaded: anyio.Event) -> None:
    for number in numbers:
        name = f"{FROM_FILE}{number}"
        await engine.adapters.load(name, name)
        engine.adapters.pin(name)  # puts it on the device at once
        engine.adapters.pin(name, False)
    loaded.set()


async def _ready(engine: Engine) -> dict[str, float]:
    """Return the milliseconds from asking for an adapter that is registered, but on disk, until it is on the device.

    The result is empty where there are slots for all.
    """
    lately = {f"{FROM_FILE}{number}" for number in range(_FILLING, _FILLING + _LOADS)}  # from a file that had settled
    gone = [info.name for info in engine.adapters.list() if info.where == "disk" and info.name in lately]
    took = []
    for name in gone[:_READIES]:
        started = time.perf_counter()
        engine.adapters.pin(name)
        while engine.adapters.versions[name].residency is not Residency.RESIDENT:  # noqa: ASYNC110 - nobody tells
            await anyio.sleep(0.0002)
        took.append(1000 * (time.perf_counter() - started))
        engine.adapters.pin(name, False)
    if not took:
        return {}
    return {"median": median(took), "least": min(took), "most": max(took)}


def _lines(data: dict[str, Any], sizes: Sizes) -> list[list[str]]:
    traffic, loading, ready = data["traffic"], data["loading"], data["ready"]
    took = "none was on disk: there are too many slots"
    if ready:
        took = f"{ready['median']:.1f} ms ({ready['least']:.1f} to {ready['most']:.1f})"
    prompts = [[f"prompts, {count} adapters", f"{rate:,.0f} tok/s"] for count, rate in data["prompts"].items()]
    return [
        *prompts,
        [f"Zipf over {sizes.slots}", f"{traffic['few']:,.0f} tok/s"],
        [f"Zipf over {sizes.adapters}", f"{traffic['many']:,.0f} tok/s"],
        ["step p99 alone", f"{loading['alone']:.2f} ms"],
        ["step p99 alone, again", f"{loading['again']:.2f} ms"],
        [f"step p99, first {_FILLING} loads", f"{loading['filling']:.2f} ms"],
        [f"step p99, {_LOADS} loads", f"{loading['loading']:.2f} ms"],
        ["from disk to ready", took],
    ]


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
