"""Cuts the ids of a step that verified drafts into one run for each work item; accepts none."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from headrace.engine.scheduling.plan import StepPlan
from headrace.engine.scheduling.result import StepResult

__all__ = ["runs_of"]


def runs_of(plan: StepPlan, result: StepResult) -> Iterator[tuple[int, list[int]]]:
    """Return (place of the first id in `result.ids`, ids) of each work item of `plan`, in order.

    Raises:
        ValueError: An item has no id, or more than its drafts allow, which is a defect of the runner.
    """
    counts = result.counts
    most = [1 + drafts for drafts in plan.drafts] + [1] * (plan.size - len(plan.drafts))
    if counts is None:
        counts = [1] * len(result.ids)
    fit = len(counts) == plan.size and sum(counts) == len(result.ids)
    if not fit or any(not 1 <= count <= limit for count, limit in zip(counts, most, strict=True)):
        raise ValueError(f"{len(result.ids)} tokens for {plan.size} works with {sum(plan.drafts)} drafts")
    return _cut(list(result.ids), counts)


def _cut(ids: list[int], counts: Sequence[int]) -> Iterator[tuple[int, list[int]]]:
    place = 0
    for count in counts:
        yield place, ids[place : place + count]
        place += count
