"""`headrace bench speculation`: tokens a second with drafts of which chance decides how many are right, and without.

Weights are mostly random, so no draft would be right by itself. Instead a row's j-th draft counts as right at the j-th
of some rates, if the drafts before it did: a row then gains 1 + r1 + r1 r2 + r1 r2 r3 + ... tokens a step. What drafts
cost is real: a head of random weights computes them, and the model verifies them. Engines open one after another; the
rows of a batch start together, and windows of as many tokens in each engine count once all of them decode.
"""

from __future__ import annotations

import itertools
from bisect import bisect_left
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, Final

import anyio
from anyio import to_thread
from rich.progress import Progress

from headrace.engine import Engine, EngineStats, SamplingParams
from headrace.engine.bench.engine.latency import reached_tokens
from headrace.engine.bench.engine.random_heads import write_head
from headrace.engine.bench.opening import BenchmarkFailed, Subject, Target, opened, require_room
from headrace.engine.bench.profile import Commit, watching
from headrace.engine.bench.report import show, spread
from headrace.engine.bench.shapes import located, spec_of
from headrace.engine.bench.workload import random_prompts
from headrace.engine.model.shared.find_gpu import means_cpu
from headrace.engine.speculation import Eagle, Speculation, speculation_of

if TYPE_CHECKING:
    from torch import Tensor

    from headrace.engine.model.cuda.drafting.drafter import Decoded, Prefilled
    from headrace.engine.model.cuda.drafting.drafts import ChangeDrafts, OpenDrafts

__all__ = ["MODES", "Plan", "drafter_of", "expected_length", "rates_of", "run", "windows"]

_RANDOM_HEAD: Final = "eagle3"
"""Drafter that is a head of random weights; options of `Eagle` may follow, as in "eagle3:quantize=int4"."""
_FREE: Final = "free"
"""Drafter that takes no time."""
MODES: Final[Mapping[str, str]] = {
    "off": "off",
    "idle": "idle (speculate=False)",
    "on": "right by the rates",
    "wrong": "never right",
}
"""What is measured, by the name of `--modes`, and its name in the table."""
_RATES: Final = (0.82, 0.77, 0.71)
"""Default rates, by which a step of three drafts gives 1 + 0.82 + 0.631 + 0.448 = 2.9 tokens."""
_POLL_SECONDS: Final = 0.005
_SPREAD: Final = 1.25
"""How far ahead of the mean of all rows the luckiest may be, in tokens generated."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What to measure, and how long."""

    batches: Sequence[int]
    k: int
    rates: Sequence[float]
    """Share of drafts that count as right at each place, among those behind right ones."""
    drafter: str
    """Name of a drafter of this benchmark, or what `drafter_of` reads; n-grams find few drafts in random text."""
    modes: Sequence[str]
    """Keys of `MODES`."""
    context: int
    """Mean tokens of a row while it is measured."""
    tokens: int
    """Tokens of a row in each window, on average over the rows."""
    warm_up: int
    """Tokens of a row before the first window, in which an engine learns what drafts cost."""
    repeats: int
    """Number of windows, one behind the other."""
    temperature: float

    @property
    def prompt(self) -> int:
        """Tokens of a prompt, so that rows have the context asked for in the middle of all windows."""
        return max(1, self.context - self.warm_up - self.repeats * self.tokens // 2)

    @property
    def grown(self) -> int:
        """Tokens that a row generates, on average, until the last window ends."""
        return self.warm_up + self.repeats * self.tokens


class _FreeDrafts:
    """Always has as many drafts as it may, whatever tokens lie there; takes no time but that of one small kernel."""

    taps = None

    def draft(self, rows_B: Tensor, depth: int, counts_B: Tensor) -> None:
        """Enqueue the number of drafts; the drafts are what the rows held before."""
        counts_B.fill_(depth)

    def take_up(self, decoded: Decoded) -> None:
        """Do nothing."""

    def take_up_prompts(self, prefilled: Prefilled) -> None:
        """Do nothing."""


def drafter_of(text: str, k: int) -> Speculation:
    """Return the way of guessing that `text` names, such as "ngram" or "draft:FOLDER", with up to `k` drafts a row.

    Raises:
        BenchmarkFailed: There is no such way.
    """
    try:
        found = speculation_of(text)
    except ValueError as error:
        raise BenchmarkFailed(f"--drafter {text}: {error}") from error
    assert found is not None
    return replace(found, k=k)


def rates_of(text: str | None, k: int) -> tuple[float, ...]:
    """Return `k` rates from a text such as "0.8,0.7,0.6", or the default ones, of which the last goes on.

    Raises:
        BenchmarkFailed: The text is of another form or length, or a number is not from 0 to 1.
    """
    if text is None:
        return (*_RATES, *[_RATES[-1]] * k)[:k]
    try:
        rates = tuple(map(float, text.split(",")))
    except ValueError:
        rates = ()
    if len(rates) != k or not all(0.0 <= rate <= 1.0 for rate in rates):
        raise BenchmarkFailed(f"--rates {text}: give {k} numbers from 0 to 1, as --k says, separated by commas")
    return rates


def expected_length(rates: Sequence[float]) -> float:
    """Return the tokens that a step with a draft for each of `rates` gives a row on average, with its own."""
    return 1.0 + sum(itertools.accumulate(rates, lambda before, rate: before * rate))


def run(target: Target, plan: Plan, json_path: str | None) -> None:
    """Measure, print and save the figures.

    Raises:
        BenchmarkFailed: A name is not known, the device cannot let chance decide about drafts, or the rows do not fit.
    """
    if unknown := [mode for mode in plan.modes if mode not in MODES]:
        raise BenchmarkFailed(f"--modes {unknown[0]}: give some of {', '.join(MODES)}")
    if plan.drafter != _FREE:
        _wanted(plan)
    if "speculation" in target.more:
        raise BenchmarkFailed("--set speculation: this benchmark chooses it; use --drafter and --k")
    if means_cpu(target.device) and (
        by_chance := [*{"on", "wrong"}.intersection(plan.modes), *{_FREE}.intersection([plan.drafter])]
    ):
        raise BenchmarkFailed(
            f"{min(by_chance)}: only a GPU lets chance decide which drafts are right, or has drafts that take no time; "
            "on a CPU, measure --modes off,idle with --drafter eagle3 or ngram, or drafts of real text with --task"
        )
    anyio.run(_run, target, plan, json_path)


async def _run(target: Target, plan: Plan, json_path: str | None) -> None:
    figures: dict[int, dict[str, dict[str, Any]]] = {batch: {} for batch in plan.batches}
    conditions: dict[str, object] = {}
    with TemporaryDirectory(prefix="headrace-") as folder, Progress(transient=True) as progress:
        task = progress.add_task("opening", total=len(plan.batches) * len(plan.modes))
        for modes, rates in ((("off",), None), (("idle", "on"), plan.rates), (("wrong",), [0.0] * plan.k)):
            if not (wanted := [mode for mode in modes if mode in plan.modes]):
                continue
            progress.update(task, description=f"opening: {wanted[0]}")
            async with _engine(target, plan, None if wanted == ["off"] else rates, Path(folder)) as subject:
                conditions = conditions or _conditions(subject, target, plan)
                for batch, mode in itertools.product(plan.batches, wanted):
                    progress.update(task, description=f"{mode}, rows: {batch}")
                    figures[batch][mode] = await _measured(subject.engine, plan, batch, mode)
                    progress.advance(task)
    data = {"conditions": conditions, "figures": figures}
    rows = [_row(batch, mode, found) for batch, found in figures.items() for mode in MODES if mode in found]
    kind = "tokens a processor second" if conditions["device"] == "cpu" else "tokens a second"
    show(f"speculation, {kind} while all rows decode", _COLUMNS, rows, data, json_path)


_COLUMNS = ("rows, drafts", "tok/s (lowest to highest)", "times off", "accepted length", "tokens a step", "depths")


def _conditions(subject: Subject, target: Target, plan: Plan) -> dict[str, object]:
    return subject.conditions(
        target,
        drafter=plan.drafter,
        k=plan.k,
        rates=",".join(map(str, plan.rates)),
        expected_length=round(expected_length(plan.rates), 3),
        context=plan.context,
        tokens=plan.tokens,
        warm_up=plan.warm_up,
        repeats=plan.repeats,
        temperature=plan.temperature,
    )


def _row(batch: int, mode: str, found: Mapping[str, dict[str, Any]]) -> list[str]:
    figure = found[mode]
    rates, ratio = figure["tokens_per_second"], "-"
    if "off" in found and mode != "off":
        pairs = zip(rates, found["off"]["tokens_per_second"], strict=True)
        ratio = spread([ours / without for ours, without in pairs], ".3f")
    steps = sum(figure["depths"].values())
    depths = ", ".join(f"{depth} ({100 * count / steps:.0f} %)" for depth, count in figure["depths"].items())
    drafted = f"{figure['accepted_length']:.2f}" if figure["drafted_runs"] else "-"
    name = f"{batch}, {MODES[mode]}"
    return [name, spread(rates, ",.0f"), ratio, drafted, f"{figure['tokens_a_step']:.2f}", depths]


@asynccontextmanager
async def _engine(target: Target, plan: Plan, rates: Sequence[float] | None, folder: Path) -> AsyncIterator[Subject]:
    """Open an engine whose drafts are right by `rates`; without speculation for None."""
    change: ChangeDrafts | None = None
    if rates is not None:
        speculation = drafter_of("ngram", plan.k) if plan.drafter == _FREE else _wanted(plan)
        if isinstance(speculation, Eagle) and speculation.path == _RANDOM_HEAD:
            speculation = replace(speculation, path=await to_thread.run_sync(_head, target.model, folder))
        target = replace(target, more={**target.more, "speculation": speculation})
        if plan.drafter == _FREE or {"on", "wrong"}.intersection(plan.modes):
            change = _by_chance(rates, is_free=plan.drafter == _FREE)
    async with opened(target, rows=max(plan.batches), change_drafts=change) as subject:
        yield subject


def _wanted(plan: Plan) -> Speculation:
    """Return the way of guessing that a plan names; a head of random weights has its name in place of a path.

    Raises:
        BenchmarkFailed: There is no such way.
    """
    name, _, options = plan.drafter.partition(":")
    return drafter_of(f"eagle:{_RANDOM_HEAD},{options}" if name == _RANDOM_HEAD else plan.drafter, plan.k)


def _head(model: str, folder: Path) -> Path:
    """Return the folder of a random head for `model` below `folder`, written once."""
    head = folder / "eagle3"
    if not head.exists():
        with located(model) as (path, _):
            write_head(head, spec_of(path))
    return head


def _by_chance(rates: Sequence[float], *, is_free: bool) -> ChangeDrafts:
    """Return what lets the drafts of an engine be right by `rates`, or takes the place of what makes them."""

    def change(drafts: OpenDrafts) -> OpenDrafts:
        drafts = drafts._replace(rates=tuple(rates))
        return drafts._replace(open=lambda table: _FreeDrafts()) if is_free else drafts

    return change


async def _measured(engine: Engine, plan: Plan, batch: int, mode: str) -> dict[str, Any]:
    """Return the figures of one batch."""
    joining = reached_tokens(engine, batch, plan.prompt, 0) - plan.prompt
    most = round(_SPREAD * plan.grown) + (plan.k + 1) * joining  # rows that start first decode while others join
    require_room(engine, [plan.prompt + most] * batch)
    prompts = random_prompts(batch, plan.prompt, vocab_size=engine.info.vocab_size, seed=batch)
    asked: dict[str, Any] = {"temperature": plan.temperature, "ignore_eos": True, "max_tokens": most}
    preempted, ended = engine.stats().preemptions, 0
    marks: list[EngineStats] = []

    async def decode(seed: int, prompt: list[int]) -> None:
        nonlocal ended
        await engine.generate(prompt, SamplingParams(seed=seed, speculate=mode != "idle", **asked))
        ended += 1

    async def reached(is_reached: Callable[[], bool]) -> bool:
        while not is_reached():
            if ended or engine.stats().preemptions > preempted:
                return False
            await anyio.sleep(_POLL_SECONDS)
        marks.append(engine.stats())
        return True

    with watching(engine, batch) as watch:
        async with anyio.create_task_group() as tasks:
            for seed, prompt in enumerate(prompts):
                tasks.start_soon(decode, seed, prompt)
            if await reached(lambda: len(watch.first_tokens) == batch):
                first = len(watch.commits)
                if await reached(lambda: _tokens(watch.commits[first:]) >= batch * plan.warm_up):
                    await reached(lambda: _tokens(watch.commits[first:]) >= batch * plan.grown)
            tasks.cancel_scope.cancel()
    if len(marks) < 3:
        raise BenchmarkFailed(f"{batch} rows did not decode together to the end of the last window")
    _, before, after = marks
    await _at_rest(engine)
    found = windows(watch.commits[first:], batch * plan.warm_up, batch * plan.tokens, plan.repeats)
    steps = [step for each in found for step in each[1:]]
    runs = after.draft_runs - before.draft_runs
    drafted = _grown(before.drafted_by_position, after.drafted_by_position)
    right = _grown(before.accepted_by_position, after.accepted_by_position)
    return {
        "tokens_per_second": [_rate(each, in_processor_time=engine.info.device == "cpu") for each in found],
        "drafted_runs": runs,
        "drafted_by_position": drafted,
        "right_by_position": right,
        "accepted_length": 1.0 + sum(right) / max(1, runs),
        "tokens_a_step": _tokens(steps) / len(steps) / batch,
        "depths": dict(sorted(Counter(step.depth for step in steps).items())),
    }


def _grown(before: Sequence[int], after: Sequence[int]) -> list[int]:
    """Return by how much counts have grown, place by place."""
    return [later - earlier for earlier, later in zip(before, after, strict=True)]


async def _at_rest(engine: Engine) -> None:
    """Wait until nothing runs."""
    while True:
        stats = engine.stats()
        if not (stats.running or stats.steps_in_flight):
            return
        await anyio.sleep(_POLL_SECONDS)


def _tokens(commits: Iterable[Commit]) -> int:
    return sum(commit.generated for commit in commits)


def windows(commits: Sequence[Commit], skipped: int, tokens: int, count: int) -> list[Sequence[Commit]]:
    """Return `count` windows of at least `tokens` tokens, one behind the other, once `skipped` tokens are over.

    Each begins with the commit that ends what is before it, which is not part of the window but begins its time.
    """
    sums = list(itertools.accumulate(commit.generated for commit in commits))
    bounds = [bisect_left(sums, skipped + number * tokens) for number in range(count + 1)]
    return [commits[begun : ended + 1] for begun, ended in itertools.pairwise(bounds)]


def _rate(window: Sequence[Commit], *, in_processor_time: bool) -> float:
    """Return the tokens a second of a window, as `windows` returns it."""
    first, last = window[0], window[-1]
    seconds = last.used - first.used if in_processor_time else last.at - first.at
    return _tokens(window[1:]) / seconds
