"""Cuts the ids of a step that verified drafts into one run for each work item, and lets plain requests gain theirs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, repeat
from operator import gt

from headrace.engine.scheduling.plan import StepPlan, Work
from headrace.engine.scheduling.request import Request
from headrace.engine.scheduling.result import NoToken, StepPart, StepResult

__all__ = ["accept_runs", "counts_of", "further_works", "repeated", "runs_of", "true_part"]


def counts_of(plan: StepPlan, result: StepResult) -> Sequence[int]:
    """Return the number of ids that each work item of `plan` was given, in order.

    Raises:
        ValueError: An item has no id, or more than its drafts allow, which is a defect of the runner.
    """
    counts = [1] * len(result.ids) if result.counts is None else result.counts
    most = [1 + drafts for drafts in plan.drafts] + [1] * (plan.size - len(plan.drafts))
    fit = len(counts) == plan.size and sum(counts) == len(result.ids)
    if not fit or min(counts, default=1) < 1 or any(map(gt, counts, most)):
        raise ValueError(f"{len(result.ids)} tokens for {plan.size} works with {sum(plan.drafts)} drafts")
    return counts


def runs_of(ids: Sequence[int], counts: Sequence[int]) -> Iterator[tuple[int, Sequence[int]]]:
    """Yield (place of the first id, ids) of each work item, in order; `counts` has the number of ids of each."""
    place = 0
    for count in counts:
        yield place, ids[place : place + count]
        place += count


def accept_runs(
    plan: StepPlan, result: StepResult, counts: Sequence[int], vocab_size: int, page_size: int
) -> tuple[list[Request], set[Request]]:
    """Append the runs of a step that verified drafts to its decodes for which `Request.plain_until` allows it.

    Steps of hundreds of rows pass this loop, so it does for each row what it must and no more.

    Args:
        plan: The plan of the step.
        result: The result of the step.
        counts: Number of ids of each work item, as `counts_of` returns them.
        vocab_size: Size of the vocabulary; an id outside it is a defect of the device.
        page_size: Tokens in a page.

    Returns:
        Requests among these decodes that have filled a page, and the requests of all other work items, which were given
        nothing.
    """
    ids, instead = list(result.ids), result.instead
    are_ids = _are_ids(ids, vocab_size)
    full: list[Request] = []
    others = {work.request for work in plan.others}
    place = 0
    for request, drafts, count in zip(plan.decodes, plan.drafts, counts, strict=False):
        run, tokens = ids[place : place + count], request.tokens
        place += count
        end = len(tokens) + count - 1
        if (
            end > request.plain_until
            or not request.stop_ids.isdisjoint(run)
            or (instead and place - 1 in instead)
            or not (are_ids or _are_ids(run, vocab_size))
        ):
            others.add(request)
            continue
        tokens += run
        request.in_flight -= 1
        request.reach -= drafts
        if drafts >= count:
            request.planned -= drafts + 1 - count
            request.known -= drafts + 1 - count
        request.computed = end
        if end % page_size < count:
            full.append(request)
    return full, others


def _are_ids(ids: Sequence[int], vocab_size: int) -> bool:
    return not ids or (min(ids) >= 0 and max(ids) < vocab_size)


def repeated(requests: Sequence[Request], counts: Sequence[int]) -> list[Request]:
    """Return each request as often as its count says, in order."""
    return list(chain.from_iterable(map(repeat, requests, counts)))


def further_works(request: Request, tokens: int) -> Iterable[Work]:
    """Return a work item of one token behind those of `request`, as often as `tokens` says."""
    return repeat(Work(request, request.row, len(request.tokens) - 1, 1, True), tokens)


def true_part(request: Request, part: StepPart, place: int, token: int | NoToken) -> StepPart:
    """Return the part of a step that gave a speculating request the token at `place` among the step's ids.

    The positions of `part` are those of the plan, which are upper bounds. A request may have tokens that a grammar has
    forced behind those that the device had when it computed the step.
    """
    end = request.computed + 1
    return part._replace(start=end - 1, end=end, place=place, token=token)
