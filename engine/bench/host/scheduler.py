"""`headrace bench scheduler`: host time of one decode step, plan and commit, with no device behind it.

Steps without drafts are measured, and steps that verify some for each row, of which all are right or none. Times are
processor times of one thread, so that other work on the machine counts little.
"""

from __future__ import annotations

import time
from statistics import median
from typing import Final, NamedTuple

from headrace.engine.bench.report import conditions, percentile, show
from headrace.engine.scheduling.asked import Asked
from headrace.engine.scheduling.plan import Capacity, StepPlan
from headrace.engine.scheduling.request import Request
from headrace.engine.scheduling.result import StepResult
from headrace.engine.scheduling.scheduler import Scheduler
from headrace.engine.scheduling.speculation.counts import Speculation

__all__ = ["run"]

_STEPS: Final = 1500
_RUNS: Final = 3
_PROMPT: Final = 100  # tokens of the shortest
_CONTEXT: Final = 2048
_PAGE: Final = 16
_VOCABULARY: Final = 50_000


class _Case(NamedTuple):
    name: str
    drafts: int
    """Drafts of each row in a step."""
    right: int
    """Drafts of these that are right, the first ones."""


class _Times(NamedTuple):
    """Seconds of each step."""

    plans: list[float]
    commits: list[float]
    counts: list[float]
    """What counting drafts takes, which an engine without speculation does not do."""

    @property
    def whole(self) -> list[float]:
        """Seconds of each step for all of it."""
        return [sum(parts) for parts in zip(*self, strict=True)]


def run(*, rows: int, drafts: int, json_path: str | None) -> None:
    """Measure plan and commit with `rows` decoding requests, one step launched ahead.

    Args:
        rows: Number of requests.
        drafts: Drafts of each request, in the steps that verify any.
        json_path: Where to write the figures; None does not.
    """
    cases = _Case("no drafts", 0, 0), _Case("all right", drafts, drafts), _Case("none right", drafts, 0)
    shown, microseconds = [], {}
    for case in cases:
        steps, found = _medians(case, rows)
        microseconds[case.name] = found
        tokens = rows * (1 + case.right)
        values = [f"{each:.0f}" for each in found.values()]
        shown.append([case.name, str(steps), str(tokens), *values, f"{found['all'] / tokens:.2f}"])
    data = {"conditions": conditions(rows=rows, drafts=drafts, runs=_RUNS), "microseconds": microseconds}
    columns = "drafts", "steps", "tokens", *microseconds["no drafts"], "all, a token"
    title = f"scheduler, µs of processor time a step of {rows} decoding rows, {drafts} drafts a row or none"
    show(title, columns, shown, data, json_path)


def _medians(case: _Case, rows: int) -> tuple[int, dict[str, float]]:
    """Return the number of measured steps, and what each part of them takes at the median, in microseconds."""
    times, bare = _quietest(case, rows, prefix_cache=True), _quietest(case, rows, prefix_cache=False)
    seconds = {
        "plan": median(times.plans),
        "commit": median(times.commits),
        "commit without prefix cache": median(bare.commits),
        "counting": median(times.counts),
        "all": median(times.whole),
        "all, p99": percentile(times.whole, 0.99),
    }
    return len(times.plans), {name: 1e6 * value for name, value in seconds.items()}


def _quietest(case: _Case, rows: int, *, prefix_cache: bool) -> _Times:
    """Return the times of the run of several whose steps took the least at the median."""
    runs = (_measured(case, rows, prefix_cache=prefix_cache) for _ in range(_RUNS))
    return min(runs, key=lambda times: median(times.whole))


def _measured(case: _Case, rows: int, *, prefix_cache: bool) -> _Times:
    """Run requests to their ends, or for `_STEPS` steps; return the times of steps in which all rows decode."""
    scheduler = _scheduler(case, rows, prefix_cache=prefix_cache)
    speculation, clock = scheduler.speculation, time.thread_time
    times = _Times([], [], [])
    pending: StepPlan | None = None
    for _ in range(_STEPS):
        started = clock()
        plan = scheduler.plan()
        planned = clock()
        if pending is not None:
            result = _result(pending, case)
            began = clock()
            scheduler.commit(pending, result)
            committed = clock()
            if speculation is not None:
                speculation.observe(pending, result, 0.01)
            counted = clock()
            if _is_full(pending, case, rows) and _is_full(plan, case, rows):
                times.plans.append(planned - started)
                times.commits.append(committed - began)
                times.counts.append(counted - committed)
        pending = plan
    return times


def _scheduler(case: _Case, rows: int, *, prefix_cache: bool) -> Scheduler:
    """Return a scheduler with requests of up to the whole context."""
    capacity = Capacity(
        num_pages=rows * (_CONTEXT // _PAGE + 2),
        page_size=_PAGE,
        max_rows=rows,
        max_batched_tokens=max(8192, rows * (2 * case.drafts + 1)),
        max_context=_CONTEXT,
        vocab_size=_VOCABULARY,
    )
    speculation = Speculation(case.drafts, lambda rows, context: case.drafts) if case.drafts else None
    scheduler = Scheduler(capacity, secret=b"benchmark", prefix_cache=prefix_cache, speculation=speculation)
    for index in range(rows):
        length = _PROMPT + index % _PAGE  # or the pages of all rows would fill up in the same steps
        prompt = [(index * 7919 + place) % _VOCABULARY for place in range(length)]
        scheduler.submit(Request(Asked(limit=_CONTEXT, speculates=case.drafts > 0), prompt))
    return scheduler


def _result(plan: StepPlan, case: _Case) -> StepResult:
    """Return what a device would answer."""
    if not plan.drafts:
        return StepResult([5] * plan.size)
    counts = [1 + min(case.right, drafts) for drafts in plan.drafts] + [1] * (plan.size - len(plan.drafts))
    return StepResult([5] * sum(counts), counts=counts, drafted=plan.drafts)


def _is_full(plan: StepPlan | None, case: _Case, rows: int) -> bool:
    """Return whether all rows decode with all of their drafts, and nothing else is computed."""
    return plan is not None and plan.size == rows and plan.tokens == rows * (1 + case.drafts)
