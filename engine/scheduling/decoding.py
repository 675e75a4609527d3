"""Plans the next token of each running request, and chunks of prompts; it owns no state and does not order prompts.

Nearly all decodes need only a place in the plan (`Request.plain_until`): the loop checks as little of each as it can.
Next to read: commit.py, which has the loop that accepts their tokens.
"""

from __future__ import annotations

from collections.abc import Sequence

from headrace.engine.scheduling.memory.growth import Growth
from headrace.engine.scheduling.plan import StepPlan, Work
from headrace.engine.scheduling.request import Request

__all__ = ["plan_decodes", "plan_tokens"]


def plan_decodes(
    plan: StepPlan, running: Sequence[Request], growth: Growth, page_size: int, now: float
) -> list[Request]:
    """Plan one token of each request that owes one token and samples the next.

    Args:
        plan: A plan without work items; decodes are added to it.
        running: Requests in service order; planning may preempt some of them.
        growth: Allocates pages to requests that need more.
        page_size: Tokens in a page.
        now: Seconds, on the clock of `Request.arrived`.

    Returns:
        Requests that owe more than one token or are pooled, whose tokens are prefilled.
    """
    decodes, starts, step = plan.decodes, plan.starts, plan.step
    prefills = []
    for request in list(running):
        start = request.planned
        if start >= request.plain_until:
            if request.known - start > 1 or (request.asked.pooling is not None and request.known > start):
                prefills.append(request)
                continue
            if not (start < request.known < request.limit and request.is_decodable):
                continue
            if not growth.make_ready(plan, request, 1, now):
                continue
            if request.is_plain:
                request.plain_until = min(request.room(page_size), request.limit - 2)
        decodes.append(request)
        starts.append(start)
        request.ready = start
        request.planned = start + 1
        request.known = start + 2
        request.latest_step = step
        request.in_flight += 1
    plan.rows += [request.row for request in decodes]
    plan.tokens = len(decodes)
    return prefills


def plan_tokens(plan: StepPlan, request: Request, most: int, growth: Growth, now: float) -> int:
    """Plan up to `most` of the tokens that `request` owes, as far as pages allow; return how many were planned."""
    start = request.planned
    count = growth.make_ready(plan, request, min(request.known - start, most), now)
    if not count:
        return 0
    samples = start + count == request.known and request.asked.pooling is None
    plan.others.append(Work(request, request.row, start, count, samples))
    plan.tokens += count
    request.ready = start
    request.latest_step = plan.step
    request.planned = start + count
    request.in_flight += 1
    if samples:
        request.known += 1
    return count
