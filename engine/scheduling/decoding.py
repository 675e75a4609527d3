"""`plan_decodes`: plans the next token of every running request: the one loop of planning that each token passes.

Owns nothing, and never plans a prompt. Nearly all requests need a place in the plan and nothing else, so the loop asks
as little as it can of each. Next to read: scheduler.py.
"""

from __future__ import annotations

from collections.abc import Sequence

from headrace.engine.scheduling.growth import Growth
from headrace.engine.scheduling.plan import StepPlan
from headrace.engine.scheduling.request import Request, State

__all__ = ["plan_decodes"]


def plan_decodes(
    plan: StepPlan, running: Sequence[Request], growth: Growth, page_size: int, now: float
) -> list[Request]:
    """Plan one token of each request that owes one and samples the next.

    Args:
        plan: Without works.
        running: In order; planning may preempt some of them.
        growth: Makes room for those that need some.
        page_size: Tokens in a page.
        now: As for `Scheduler.plan`.

    Returns:
        Those that owe more, or are pooled: their tokens are prompts.
    """
    decodes, rows, starts, step = plan.decodes, plan.rows, plan.starts, plan.step
    is_running, prefills = State.RUNNING, []
    for request in list(running):
        start, known = request.planned, request.known
        if known == start:
            continue
        if known - start > 1 or request.pooling is not None:
            prefills.append(request)
            continue
        if known == request.limit or request.state is not is_running or request.leaving:
            continue
        is_full = start == len(request.pages) * page_size
        if is_full or request.forked or request.unsent or request.processor is not None:
            if not request.is_decodable or not growth.make_ready(plan, request, 1, now):
                continue
        decodes.append(request)
        rows.append(request.row)
        starts.append(start)
        request.ready, request.planned, request.known = start, known, known + 1
        request.latest_step = step
        request.in_flight += 1
    plan.tokens = len(decodes)
    return prefills
