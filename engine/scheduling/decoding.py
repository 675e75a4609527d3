"""Plans the next token of every running request, and takes those that come: the two loops that each token passes.

Owns nothing, and never says which prompt is next. Nearly all requests need a place in the plan, and later a token, and
nothing else (`Request.smooth`), so the loops ask as little as they can of each. Next to read: scheduler.py.
"""

from __future__ import annotations

from collections.abc import Sequence

from headrace.engine.scheduling.memory.growth import Growth
from headrace.engine.scheduling.plan import StepPlan, Work
from headrace.engine.scheduling.request import Request

__all__ = ["plan_decodes", "plan_tokens", "take_tokens"]


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
    decodes, starts, step = plan.decodes, plan.starts, plan.step
    prefills = []
    for request in list(running):
        start = request.planned
        if start >= request.smooth:
            if request.known - start > 1 or (request.pooling is not None and request.known > start):
                prefills.append(request)
                continue
            if not (start < request.known < request.limit and request.is_decodable):
                continue
            if not growth.make_ready(plan, request, 1, now):
                continue
            if not (request.forked or request.jumps or request.discard or request.processor is not None):
                request.smooth = min(len(request.pages) * page_size, request.limit - 2)
        decodes.append(request)
        starts.append(start)
        request.ready, request.planned, request.known = start, start + 1, start + 2
        request.latest_step = step
        request.in_flight += 1
    plan.rows += [request.row for request in decodes]
    plan.tokens = len(decodes)
    return prefills


def plan_tokens(plan: StepPlan, request: Request, most: int, growth: Growth, now: float) -> int:
    """Plan up to `most` of what `request` owes, as far as pages can be had; how many were planned."""
    start = request.planned
    count = growth.make_ready(plan, request, min(request.known - start, most), now)
    if not count:
        return 0
    samples = start + count == request.known and request.pooling is None
    plan.others.append(Work(request, request.row, start, count, samples))
    plan.tokens += count
    request.ready = start
    request.latest_step = plan.step
    request.planned = start + count
    request.in_flight += 1
    if samples:
        request.known += 1
    return count


def take_tokens(
    plan: StepPlan, tokens: Sequence[int], vocab_size: int, page_size: int
) -> tuple[list[Request], set[Request]]:
    """Give a finished step's tokens to those of its decodes that only go on.

    Args:
        plan: The step's.
        tokens: One for each of its works.
        vocab_size: Other tokens mean something else.
        page_size: Tokens in a page.

    Returns:
        Those of them whose latest page is full now, and the requests of all other works, which were given nothing.

    Raises:
        ValueError: The runner gave another number of tokens: a defect of it.
    """
    if len(tokens) != plan.size:
        raise ValueError(f"{len(tokens)} tokens for {plan.size} works")
    full: list[Request] = []
    others = {work.request for work in plan.others}
    for request, start, token in zip(plan.decodes, plan.starts, tokens, strict=False):
        if start < request.smooth and 0 <= token < vocab_size and token not in request.stop_ids:
            request.in_flight -= 1
            request.computed = end = start + 1
            request.tokens.append(token)
            if not end % page_size:
                full.append(request)
        else:
            others.add(request)
    return full, others
