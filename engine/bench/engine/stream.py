"""`headrace bench stream`: the public workload as one `async for` a request, text included, beside the same offline.

Runs alternate within one engine, so the loss from streaming is that of this machine, this minute. A timer on the event
loop measures how late the application's own coroutines run meanwhile.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from statistics import median
from typing import Any, NamedTuple

import anyio
from rich.progress import Progress

from headrace.engine import Engine, SamplingParams
from headrace.engine.bench.engine.throughput import OfflineRun, floor_rate, run_offline
from headrace.engine.bench.opening import BenchmarkFailed, Subject, Target, opened, require_room
from headrace.engine.bench.profiled import lag_timer, profile_work
from headrace.engine.bench.report import percentile, save, show, spread
from headrace.engine.bench.workload import Workload, public_workload

__all__ = ["StreamRun", "run", "run_streams"]


class StreamRun(NamedTuple):
    """One run of a workload as streams."""

    seconds: float
    first_tokens: list[float]
    """Seconds from the start until each reader had its first token."""
    intervals: list[float]
    """Seconds between successive tokens of the same stream, as its reader saw them."""
    lags: list[float]
    """Milliseconds by which the loop's timer was late."""
    characters: int


def run(target: Target, *, requests: int, scale: float, repeats: int, profile: bool, json_path: str | None) -> None:
    """Measure, print and save the figures."""
    anyio.run(_run, target, requests, scale, repeats, profile, json_path)


async def _run(target: Target, requests: int, scale: float, repeats: int, profile: bool, json_path: str | None) -> None:
    offline: list[OfflineRun] = []
    streamed: list[StreamRun] = []
    async with opened(target, rows=requests) as subject:

        def draw(variant: int) -> Workload:
            return public_workload(
                requests=requests, scale=scale, vocab_size=subject.engine.info.vocab_size, variant=variant
            )

        first = draw(0)
        require_room(subject.engine, [len(p) + n for p, n in zip(first.prompts, first.outputs, strict=True)])
        with Progress(transient=True) as progress:
            task = progress.add_task("measuring", total=2 * (repeats + 1))
            for repeat in range(repeats + 1):  # the first round warms up
                for turn in ("offline", "stream") if repeat % 2 else ("stream", "offline"):
                    workload = draw(2 * repeat + (turn == "stream"))
                    if turn == "offline":
                        offline.append(await run_offline(subject.engine, workload))
                    else:
                        streamed.append(await run_streams(subject.engine, workload))
                    progress.advance(task)
        del offline[0], streamed[0]
        data: dict[str, Any] = {
            "conditions": subject.conditions(
                target, requests=requests, scale=scale, output_tokens=first.output_tokens, repeats=repeats
            ),
            "offline_tokens_per_second": [first.output_tokens / each.seconds for each in offline],
            "tokens_per_second": [first.output_tokens / each.seconds for each in streamed],
            "floor_tokens_per_second": floor_rate(subject, first),
        }
        data["text"] = text = _text(subject, streamed)
        figures = _figures(data, streamed)
        rows = [["text included", text], *([name, cell] for name, cell in figures.items())]
        title = f"public workload, {requests} streams (median, lowest to highest)"
        show(title, ("what", "figure"), rows, data, json_path)
        if profile:
            data["profile"] = await profile_work(
                subject, lambda: run_streams(subject.engine, draw(2 * repeats + 2)), "stream", rows=requests
            )
            save(data, json_path)


def _text(subject: Subject, streamed: Sequence[StreamRun]) -> str:
    characters = streamed[-1].characters
    source = "a synthetic vocabulary" if subject.random else "the model's tokenizer"
    return f"yes, of {source}: {characters:,} characters" if characters else "no"


def _figures(data: dict[str, Any], streamed: Sequence[StreamRun]) -> dict[str, str]:
    """Return the table's cells, and add the figures behind them to `data`."""
    offline, rates = data["offline_tokens_per_second"], data["tokens_per_second"]
    data["loss"] = losses = [1 - rate / beside for rate, beside in zip(rates, offline, strict=True)]
    data["ttft_p50_ms"] = firsts = [1000 * median(each.first_tokens) for each in streamed]
    figures = {
        "output tok/s": spread(rates, ",.0f"),
        "offline, tok/s": spread(offline, ",.0f"),
        "loss from streaming": spread(losses, ".1%"),
        "floor, tok/s": f"{data['floor_tokens_per_second']:,.0f}",
        "TTFT p50, ms": spread(firsts, ",.0f"),
    }
    for name, share in (("p50", 0.5), ("p99", 0.99)):
        data[f"itl_{name}_ms"] = intervals = [1000 * percentile(each.intervals, share) for each in streamed]
        figures[f"ITL {name}, ms"] = spread(intervals, ".2f")
    for name, share in (("p50", 0.5), ("p99", 0.99)):
        data[f"loop_lag_{name}_ms"] = lags = [percentile(each.lags, share) for each in streamed]
        figures[f"event-loop lag {name}, ms"] = spread(lags, ".2f")
    return figures


async def run_streams(engine: Engine, workload: Workload) -> StreamRun:
    """Read every request with an `async for` of its own, while a timer runs beside them.

    Raises:
        BenchmarkFailed: The number of tokens is not that of the workload.
    """
    arrivals: list[list[float]] = []
    characters = 0

    async def read(prompt: list[int], params: SamplingParams) -> None:
        nonlocal characters
        times: list[float] = []
        arrivals.append(times)
        length = 0
        async for token in engine.stream(prompt, params):
            times.append(time.perf_counter())
            length += len(token.text)
        characters += length

    started = time.perf_counter()
    async with lag_timer() as lags:
        async with anyio.create_task_group() as tasks:
            for prompt, params in zip(workload.prompts, workload.params(), strict=True):
                tasks.start_soon(read, prompt, params)
        ended = time.perf_counter()
    received = sum(map(len, arrivals))
    if received != workload.output_tokens:
        raise BenchmarkFailed(f"{received} tokens came instead of {workload.output_tokens}")
    intervals = [later - earlier for times in arrivals for earlier, later in zip(times, times[1:], strict=False)]
    return StreamRun(ended - started, [times[0] - started for times in arrivals], intervals, lags, characters)
