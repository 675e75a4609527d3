"""`headrace bench scheduler`: host time of one decode step, plan and commit, with no device behind it."""

from __future__ import annotations

import time
from statistics import median

from headrace.engine.bench.report import conditions, percentile, show
from headrace.engine.scheduling.asked import Asked
from headrace.engine.scheduling.plan import Capacity, StepPlan
from headrace.engine.scheduling.request import Request
from headrace.engine.scheduling.result import StepResult
from headrace.engine.scheduling.scheduler import Scheduler

__all__ = ["run"]

_STEPS = 1500
_PROMPT = 100


def run(*, rows: int, json_path: str | None) -> None:
    """Measure plan and commit with `rows` decoding requests, one step launched ahead."""
    capacity = Capacity(
        num_pages=rows * 128,
        page_size=16,
        max_rows=rows,
        max_batched_tokens=max(8192, rows),
        max_context=2048,
        vocab_size=50_000,
    )
    scheduler = Scheduler(capacity, secret=b"benchmark")
    for index in range(rows):
        prompt = [(index * 7919 + place) % 50_000 for place in range(_PROMPT)]
        scheduler.submit(Request(Asked(limit=2048), prompt))
    plans: list[float] = []
    commits: list[float] = []
    pending: StepPlan | None = None
    for _ in range(_STEPS):
        started = time.perf_counter()
        plan = scheduler.plan()
        planned = time.perf_counter()
        if pending is not None:
            scheduler.commit(pending, StepResult([5] * pending.size))
        if pending is not None and pending.size == pending.tokens == rows:
            plans.append(planned - started)
            commits.append(time.perf_counter() - planned)
        pending = plan
    both = [a + b for a, b in zip(plans, commits, strict=True)]
    rows_shown = [
        [name, f"{1e6 * median(values):.0f}", f"{1e6 * percentile(values, 0.99):.0f}"]
        for name, values in (("plan", plans), ("commit", commits), ("both", both))
    ]
    data = {
        "conditions": conditions(rows=rows, steps=len(both)),
        "microseconds": {"plan": 1e6 * median(plans), "commit": 1e6 * median(commits), "both": 1e6 * median(both)},
    }
    show(f"scheduler, µs a step of {rows} decoding rows", ("part", "median", "p99"), rows_shown, data, json_path)
