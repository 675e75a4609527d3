"""`headrace bench latency`: time of a decode step for each batch size, and the rate of prompts, beside their floors.

A step's time is the interval between commits while every row decodes: no prefill, no start, no end. Prompts are shorter
than the context asked for by half of what they grow, so that the mean step has that context; each repeat has fresh
random ones. A peer's step is the difference of a long and a short run, divided by the tokens between them. Of a mixture
of experts the last repeat runs once more, not timed, to count the experts that its steps choose, and tokens may be made
to choose all the same ones, or each row others (rigged.py).
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from statistics import mean, median
from typing import Any

import anyio
from rich.progress import Progress, TaskID

from headrace.engine import Engine, InvalidParams, SamplingParams
from headrace.engine.bench.chosen import counting
from headrace.engine.bench.engine.peers import Peer, open_peer
from headrace.engine.bench.opening import BenchmarkFailed, Subject, Target, opened, require_room
from headrace.engine.bench.profile import steady_intervals, watching
from headrace.engine.bench.profiled import WINDOW, profile_work
from headrace.engine.bench.report import percentile, save, show, spread, table
from headrace.engine.bench.rigged import RiggedRouting, rigged
from headrace.engine.bench.workload import random_prompts

__all__ = ["decode", "parse_params", "parse_prefill", "reached_tokens", "run"]

_SKIP = 16  # steps after the last prefill before intervals count


def run(
    target: Target,
    *,
    batches: Sequence[int],
    context: int,
    steps: int,
    prefill: str | None,
    repeats: int,
    peer: str | None,
    profile: bool,
    json_path: str | None,
    params: str | None = None,
    routing: str = "uniform",
) -> None:
    """Measure, print and save the figures.

    Raises:
        BenchmarkFailed: An option is malformed, `params` or another `routing` than `uniform` are given together with a
            peer, or the routing is not possible.
    """
    shape = parse_prefill(prefill) if prefill else None
    asked = parse_params(params) if params else {}
    if asked and peer is not None:
        raise BenchmarkFailed(f"--params {params}: a peer's rows are greedy; leave out one of the two")
    with rigged(routing, target) as rig:
        if rig is not None and peer is not None:
            raise BenchmarkFailed(f"--routing {routing}: a peer has weights of its own; leave out one of the two")
        anyio.run(_run, target, batches, (context, steps), shape, repeats, peer, profile, json_path, asked, rig)


def parse_params(text: str) -> dict[str, Any]:
    """Return fields of `SamplingParams` from a JSON object.

    Raises:
        BenchmarkFailed: The text is no JSON object, or the fields are not valid.
    """
    try:
        asked: dict[str, Any] = json.loads(text)
        _params(1, asked)
    except (ValueError, TypeError, InvalidParams) as error:
        raise BenchmarkFailed(f'--params {text}: give fields such as {{"top_k": 40}}; {error}') from error
    return asked


def parse_prefill(text: str) -> tuple[int, int]:
    """Return (prompts, tokens of each) from a text such as "32x2048".

    Raises:
        BenchmarkFailed: The text is not of that form.
    """
    count, separator, tokens = text.partition("x")
    if not (separator and count.isdecimal() and tokens.isdecimal() and int(count) and int(tokens)):
        raise BenchmarkFailed(f"--prefill {text}: give prompts and tokens of each, such as 32x2048")
    return int(count), int(tokens)


async def _run(
    target: Target,
    batches: Sequence[int],
    lengths: tuple[int, int],
    prefill: tuple[int, int] | None,
    repeats: int,
    peer: str | None,
    profile: bool,
    json_path: str | None,
    asked: Mapping[str, Any],
    rig: RiggedRouting | None,
) -> None:
    context, steps = lengths
    needed = max([*batches, prefill[0] if prefill else 1])
    async with opened(target, rows=needed) as subject:
        for batch in batches:
            require_room(subject.engine, [reached_tokens(subject.engine, batch, context, steps)] * batch)
        if prefill is not None:
            require_room(subject.engine, [prefill[1] + 1] * prefill[0])
        with open_peer(peer, subject, target) as other, Progress(transient=True) as progress:
            rounds = len(batches) * (2 if other else 1) + (1 if prefill else 0)
            counts = len(batches) if _is_countable(subject) else 0
            task = progress.add_task("measuring", total=rounds * (repeats + 1) + counts)
            measure = _Measure(subject, other, repeats, asked, progress, task, rig)
            figures = [await measure.batch(batch, context, steps) for batch in batches]
            rates = await measure.prefill(*prefill) if prefill else []
        more = {} if rig is None else {"routing": rig.how}
        data: dict[str, Any] = {
            "conditions": subject.conditions(target, context=context, steps=steps, repeats=repeats, **more, **asked),
            "decode": figures,
        }
        if other is not None:
            data["conditions"][other.name] = other.version
        if prefill is not None:
            floor = prefill[0] * prefill[1] / subject.cost.prefill_seconds([prefill[1]] * prefill[0], subject.speed)
            data["prefill"] = {"shape": prefill, "tokens_per_second": rates, "floor_tokens_per_second": floor}
            _print_prefill(data["prefill"])
        columns = (*_COLUMNS, *(_EXPERTS if subject.cost.experts else ()))
        columns = columns if other is None else (*columns, other.name, "ratio")
        show("decode step, ms", columns, [_row(each) for each in figures], data, json_path)
        if profile:
            data["profile"] = {
                each["batch"]: await _profiled(subject, each, context, steps, asked, rig) for each in figures
            }
            save(data, json_path)


_COLUMNS = ("batch", "median", "p10 to p90", "tok/s", "floor", "% of floor")
_EXPERTS = (
    "distinct experts of a layer: mean over layers (lowest to highest)",
    "expected of all",
    "MB of experts",
    "GB/s",
)
"""What steps were seen to choose, which the floor reads; what independent choices would be expected to hit; the bytes
of chosen experts that a step reads; and the bytes of all that it reads and writes by the second, at the median."""


def _print_prefill(figures: dict[str, Any]) -> None:
    (count, tokens), rates, floor = figures["shape"], figures["tokens_per_second"], figures["floor_tokens_per_second"]
    cells = [f"{count} x {tokens}", spread(rates, ",.0f"), f"{floor:,.0f}", f"{100 * median(rates) / floor:.0f}"]
    table("prefill, tok/s", ("prompts", "median (lowest to highest)", "floor", "% of floor"), [cells])


def _row(figure: dict[str, Any]) -> list[str]:
    step, floor = figure["step_ms"]["p50"], figure["floor_ms"]
    cells = [
        str(figure["batch"]),
        f"{step:.3f}",
        f"{figure['step_ms']['p10']:.3f} to {figure['step_ms']['p90']:.3f}",
        f"{1000 * figure['batch'] / step:,.0f}",
        f"{floor:.3f}",
        f"{100 * floor / step:.0f}",
    ]
    if "expected_experts" in figure:
        chosen = figure["chosen_experts"]
        cells.append(f"{mean(chosen):.1f} ({min(chosen):.1f} to {max(chosen):.1f})" if chosen else "not seen")
        cells.append(f"{figure['expected_experts']:.1f} of {figure['experts']}")
        cells += [f"{figure['expert_bytes'] / 1e6:,.1f}", f"{figure['bytes'] / step / 1e6:,.1f}"]
    if "peer_step_ms" in figure:
        theirs = figure["peer_step_ms"]
        ratios = [its / ours for its, ours in zip(theirs, figure["medians_ms"], strict=True)]
        cells += [spread(theirs, ".3f"), spread(ratios, ".2f")]
    return cells


def _is_countable(subject: Subject) -> bool:
    """Return whether steps can be seen to choose experts; those of rows that speculate have tokens of several kinds."""
    return subject.cost.experts > 0 and subject.engine.config.speculation is None


class _Measure:
    """Repeats over one open engine and, in turn, a peer; each round's first repeat warms up."""

    def __init__(
        self,
        subject: Subject,
        other: Peer | None,
        repeats: int,
        asked: Mapping[str, Any],
        progress: Progress,
        task: TaskID,
        rig: RiggedRouting | None,
    ) -> None:
        self._subject = subject
        self._rig = rig
        self._asked = asked
        self._other = other
        self._repeats = repeats
        self._progress = progress
        self._task = task
        self._seeds: Iterator[int] = iter(range(1 << 30))

    def _prompts(self, count: int, tokens: int) -> list[list[int]]:
        return _drawn(self._subject.engine, count, tokens, next(self._seeds), self._rig)

    async def batch(self, batch: int, context: int, steps: int) -> dict[str, Any]:
        """Return the figures of one batch size, in milliseconds."""
        subject = self._subject
        prompt = _prompt(subject.engine, batch, context, steps)
        ours: list[list[float]] = []
        theirs: list[float] = []
        prompts: list[list[int]] = []
        for _ in range(self._repeats + 1):
            prompts = self._prompts(batch, prompt)
            intervals = await decode(subject.engine, prompts, steps, self._asked)
            ours.append([1000 * interval for interval in intervals])
            self._progress.advance(self._task)
            if self._other is not None:
                theirs.append(1000 * self._peer_step(self._other, batch, prompt, steps))
                self._progress.advance(self._task)
        pooled = [interval for each in ours[1:] for interval in each]
        reached = prompt + _growth(subject.engine, batch, context, steps)
        chosen = await self._chosen(prompts, steps) if _is_countable(subject) else []
        experts = mean(chosen) if chosen else None
        if self._rig is not None:
            self._rig.check(batch, experts)
        figure = {
            "batch": batch,
            "step_ms": {"p10": percentile(pooled, 0.1), "p50": median(pooled), "p90": percentile(pooled, 0.9)},
            "mean_ms": mean(pooled),
            "medians_ms": [median(each) for each in ours[1:]],
            "intervals": len(pooled),
            "mean_context": reached,
            "floor_ms": 1000 * subject.cost.decode_seconds([reached] * batch, subject.speed, experts),
        }
        if subject.cost.experts:
            figure |= {
                "chosen_experts": chosen,
                "expected_experts": subject.cost.expected_experts(batch),
                "experts": subject.cost.experts,
                "expert_bytes": subject.cost.expert_bytes_read(batch, experts),
                "bytes": subject.cost.decode_bytes([reached] * batch, experts),
            }
        return figure | ({"peer_step_ms": theirs[1:]} if self._other else {})

    async def _chosen(self, prompts: Sequence[list[int]], steps: int) -> list[float]:
        """Return the distinct experts of each layer that steps such as the timed ones choose; empty if none is seen."""
        engine = self._subject.engine
        with counting(engine, len(prompts)) as seen:
            await decode(engine, prompts, steps, self._asked)
        self._progress.advance(self._task)
        return seen.by_layer(_SKIP, steps)

    def _peer_step(self, other: Peer, batch: int, context: int, steps: int) -> float:
        """Return the seconds of the peer's decode step: the time that `steps` more tokens add, divided by `steps`."""
        short, long = (
            other.run(self._prompts(batch, context), [_params(count)] * batch) for count in (_SKIP, _SKIP + steps)
        )
        return (long - short) / steps

    async def prefill(self, count: int, tokens: int) -> list[float]:
        """Return the prompt tokens a second of each repeat, from the first request to the last first token."""
        rates = []
        for _ in range(self._repeats + 1):
            prompts = self._prompts(count, tokens)
            started = time.perf_counter()
            await _generate(self._subject.engine, prompts, _params(1))
            rates.append(count * tokens / (time.perf_counter() - started))
            self._progress.advance(self._task)
        return rates[1:]


async def decode(engine: Engine, prompts: Sequence[list[int]], steps: int, asked: Mapping[str, Any]) -> list[float]:
    """Return the seconds of `steps` decode steps in which all rows decode, with the sampling values `asked`.

    Raises:
        BenchmarkFailed: All rows decoded together in fewer than half of the steps.
    """
    with watching(engine, 0) as watch:
        tokens = _output(engine, len(prompts), len(prompts[0]), steps)
        await _generate(engine, prompts, _params(tokens, asked))
    intervals = steady_intervals(watch.commits, len(prompts), _SKIP)
    if len(intervals) < steps // 2:
        raise BenchmarkFailed(f"only {len(intervals)} of {steps} steps had all {len(prompts)} rows decoding")
    return intervals[:steps]


def reached_tokens(engine: Engine, batch: int, context: int, steps: int) -> int:
    """Return the tokens that rows of `context` tokens may have once `steps` steps of all rows were measured."""
    return context + _SKIP + steps + _joining(engine, batch, context)


def _joining(engine: Engine, batch: int, context: int) -> int:
    """Return the most steps until every row decodes; the rows that start first decode meanwhile."""
    return -(-batch * context // max(1, engine.info.max_batched_tokens - batch))


def _growth(engine: Engine, batch: int, context: int, steps: int) -> int:
    """Return the tokens by which a row has grown in the middle of the steps that count."""
    return _SKIP + steps // 2 + _joining(engine, batch, context) // 2


def _drawn(engine: Engine, count: int, tokens: int, seed: int, rig: RiggedRouting | None) -> list[list[int]]:
    prompts = random_prompts(count, tokens, vocab_size=engine.info.vocab_size, seed=seed)
    return prompts if rig is None else rig.ended(prompts)


def _prompt(engine: Engine, batch: int, context: int, steps: int) -> int:
    return max(1, context - _growth(engine, batch, context, steps))


def _output(engine: Engine, batch: int, context: int, steps: int) -> int:
    """Return the tokens that each row must generate so that all rows decode together for long enough."""
    return _joining(engine, batch, context) + _SKIP + steps


async def _profiled(
    subject: Subject,
    figure: dict[str, Any],
    context: int,
    steps: int,
    asked: Mapping[str, Any],
    rig: RiggedRouting | None,
) -> dict[str, Any]:
    batch = figure["batch"]
    prompt = _prompt(subject.engine, batch, context, steps)
    prompts = _drawn(subject.engine, batch, prompt, batch << 32, rig)
    lasting = max(steps, round(2000 * WINDOW / figure["step_ms"]["p50"]))
    return await profile_work(
        subject,
        lambda: decode(subject.engine, prompts, steps, asked),
        f"batch {batch}",
        rows=batch,
        traced=lambda: decode(subject.engine, prompts, lasting, asked),
    )


async def _generate(engine: Engine, prompts: Sequence[list[int]], params: SamplingParams) -> None:
    async with anyio.create_task_group() as tasks:
        for prompt in prompts:
            tasks.start_soon(engine.generate, prompt, params)


def _params(tokens: int, asked: Mapping[str, Any] | None = None) -> SamplingParams:
    return SamplingParams(**{"temperature": 0.0, "ignore_eos": True, **(asked or {}), "max_tokens": tokens})
