"""`headrace bench throughput`: the public workload through `engine.generate`, all requests at once.

A warm-up run comes first, and each run has ids of its own, so that no prompt is found in the prefix cache. With a peer
the two engines take turns, and the ratio is taken within each pair of runs.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from statistics import median
from typing import Any, NamedTuple

import anyio
from rich.progress import Progress

from headrace.engine import Engine, SamplingParams
from headrace.engine.bench.engine.peers import Peer, open_peer
from headrace.engine.bench.opening import BenchmarkFailed, Subject, Target, opened, require_room
from headrace.engine.bench.profile import watching
from headrace.engine.bench.profiled import profile_work
from headrace.engine.bench.report import save, show, spread
from headrace.engine.bench.workload import Workload, public_workload

__all__ = ["OfflineRun", "floor_rate", "run", "run_offline"]


class OfflineRun(NamedTuple):
    """One run of a workload."""

    seconds: float
    first_tokens: list[float]
    """Seconds from the start to each request's first committed token."""
    steps: int
    preemptions: int


def run(
    target: Target,
    *,
    requests: int,
    scale: float,
    repeats: int,
    peer: str | None,
    profile: bool,
    json_path: str | None,
) -> None:
    """Measure, print and save the figures."""
    anyio.run(_run, target, requests, scale, repeats, peer, profile, json_path)


async def _run(
    target: Target, requests: int, scale: float, repeats: int, peer: str | None, profile: bool, json_path: str | None
) -> None:
    async with opened(target, rows=requests) as subject:

        def draw(variant: int) -> Workload:
            return public_workload(
                requests=requests, scale=scale, vocab_size=subject.engine.info.vocab_size, variant=variant
            )

        first = draw(0)
        require_room(subject.engine, [len(p) + n for p, n in zip(first.prompts, first.outputs, strict=True)])
        with open_peer(peer, subject, target) as other:
            runs, theirs = await _measure(subject.engine, draw, repeats, other)
        rates = [first.output_tokens / each.seconds for each in runs]
        peer_rates = [first.output_tokens / seconds for seconds in theirs]
        floor = floor_rate(subject, first)
        data: dict[str, Any] = {
            "conditions": subject.conditions(
                target,
                requests=requests,
                scale=scale,
                prompt_tokens=first.prompt_tokens,
                output_tokens=first.output_tokens,
                repeats=repeats,
            ),
            "headrace": {"tokens_per_second": rates, "runs": [each._asdict() for each in runs]},
            "floor_tokens_per_second": floor,
        }
        if other is not None:
            data["conditions"][other.name] = other.version
            data[other.name] = {"tokens_per_second": peer_rates}
        rows = _rows(runs, rates, floor)
        if other is not None:
            ratios = [ours / its for ours, its in zip(rates, peer_rates, strict=True)]
            rows += [[f"{other.name}, tok/s", spread(peer_rates, ",.0f")], ["ratio", spread(ratios, ".3f")]]
        show("public workload, offline (median, lowest to highest)", ("what", "figure"), rows, data, json_path)
        if profile:
            data["profile"] = await profile_work(
                subject, lambda: run_offline(subject.engine, draw(repeats + 1)), "throughput", rows=requests
            )
            save(data, json_path)


def _rows(runs: Sequence[OfflineRun], rates: Sequence[float], floor: float) -> list[list[str]]:
    return [
        ["output tok/s", spread(rates, ",.0f")],
        ["floor, tok/s", f"{floor:,.0f}"],
        ["% of floor", f"{100 * median(rates) / floor:.1f}"],
        ["TTFT p50, ms", spread([1000 * median(each.first_tokens) for each in runs], ",.0f")],
        ["steps", spread([each.steps for each in runs], "d" if len(runs) % 2 else "g")],
        ["preemptions", str(max(each.preemptions for each in runs))],
    ]


def floor_rate(subject: Subject, workload: Workload) -> float:
    """Return the output tokens a second that no engine on this machine can exceed."""
    prompts = [len(prompt) for prompt in workload.prompts]
    return workload.output_tokens / subject.cost.workload_seconds(prompts, workload.outputs, subject.speed)


async def _measure(
    engine: Engine, draw: Callable[[int], Workload], repeats: int, other: Peer | None
) -> tuple[list[OfflineRun], list[float]]:
    """Return headrace's runs and the seconds of the peer's, without the first round, which warms up."""
    runs: list[OfflineRun] = []
    theirs: list[float] = []
    with Progress(transient=True) as progress:
        task = progress.add_task("measuring", total=(repeats + 1) * (2 if other else 1))
        for repeat in range(repeats + 1):
            workload = draw(repeat)

            async def ours(workload: Workload = workload) -> None:
                runs.append(await run_offline(engine, workload))
                progress.advance(task)

            async def its(workload: Workload = workload) -> None:
                assert other is not None
                theirs.append(other.run(workload.prompts, workload.params()))
                progress.advance(task)

            turns = [ours] if other is None else [ours, its] if repeat % 2 else [its, ours]
            for turn in turns:
                await turn()
    return runs[1:], theirs[1:]


async def run_offline(engine: Engine, workload: Workload) -> OfflineRun:
    """Generate everything at once and wait for it all.

    Raises:
        BenchmarkFailed: The number of tokens is not that of the workload.
    """
    counts: list[int] = []

    async def generate(prompt: list[int], params: SamplingParams) -> None:
        counts.append((await engine.generate(prompt, params)).usage.completion_tokens)

    before = engine.stats()
    with watching(engine, len(workload.prompts)) as watch:
        started = time.perf_counter()
        async with anyio.create_task_group() as tasks:
            for prompt, params in zip(workload.prompts, workload.params(), strict=True):
                tasks.start_soon(generate, prompt, params)
        seconds = time.perf_counter() - started
    if sum(counts) != workload.output_tokens:
        raise BenchmarkFailed(f"{sum(counts)} tokens came instead of {workload.output_tokens}")
    after = engine.stats()
    firsts = [at - started for at in watch.first_tokens.values()]
    return OfflineRun(seconds, firsts, after.steps - before.steps, after.preemptions - before.preemptions)
