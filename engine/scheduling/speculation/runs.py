"""Cuts the ids of a step that verified drafts into one run for each work item, and lets plain requests gain theirs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from headrace.engine.scheduling.plan import StepPlan
from headrace.engine.scheduling.request import Request
from headrace.engine.scheduling.result import NoToken, StepPart, StepResult

__all__ = ["gain_run", "runs_of", "true_part"]


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


def gain_run(request: Request, drafts: int, ids: Sequence[int], vocab_size: int) -> bool:
    """Append a run of ids to the tokens of a plain request that goes on; return False if it needs a closer look.

    Args:
        request: The request of a decode.
        drafts: Number of drafts that the step might verify for it.
        ids: What the step gave it, at least one id.
        vocab_size: Size of the vocabulary; an id outside it is a defect of the device.
    """
    count = len(ids)
    end = len(request.tokens) + count
    if end > request.plain_until + 1 or (request.stop_ids and not request.stop_ids.isdisjoint(ids)):
        return False
    if min(ids) < 0 or max(ids) >= vocab_size:
        return False
    request.in_flight -= 1
    request.settle(drafts, count)
    request.tokens += ids
    request.computed = end - 1
    return True


def true_part(request: Request, part: StepPart, place: int, token: int | NoToken) -> StepPart:
    """Return the part of a step that gave a speculating request the token at `place` among the step's ids.

    The positions of `part` are those of the plan, which are upper bounds. A request may have tokens that a grammar has
    forced behind those that the device had when it computed the step.
    """
    end = request.computed + 1
    return part._replace(start=end - 1, end=end, place=place, token=token)
