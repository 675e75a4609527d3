"""Plans drafts behind the tokens of decodes; preempts nobody for them. Next to read: depth.py, which says how many."""

from __future__ import annotations

from headrace.engine.scheduling.memory.pages import PagePool
from headrace.engine.scheduling.plan import PageEntry, StepPlan
from headrace.engine.scheduling.request import Request

__all__ = ["plan_drafts"]


def plan_drafts(plan: StepPlan, pool: PagePool, spare: int) -> None:
    """Plan drafts behind the tokens of decodes, as far as limits allow, and pages do that nobody else needs.

    Args:
        plan: A plan whose decodes are planned; its depth is how many drafts each may have.
        pool: The pages.
        spare: Pages to leave for others, so that drafts preempt nobody now or in the next step.
    """
    depth, size = plan.depth, pool.page_size
    for request in plan.decodes:
        if not request.asked.speculates or request.leaving:
            plan.drafts.append(0)
            continue
        drafts = depth
        if request.planned + depth > request.plain_until:  # pages or the limit may be nearer than that
            wanted = min(depth, request.limit - request.known)
            _grow(plan, pool, spare, request, request.planned + wanted)
            drafts = max(0, min(wanted, request.room(size) - request.planned))
            if request.plain_until:
                request.plain_until = min(request.room(size), request.limit - 2)
        request.reach += drafts
        request.planned += drafts
        request.known += drafts
        plan.drafts.append(drafts)
    plan.tokens += sum(plan.drafts)
    if not any(plan.drafts):
        plan.drafts, plan.depth = [], 0


def _grow(plan: StepPlan, pool: PagePool, spare: int, request: Request, end: int) -> None:
    """Give `request` pages for the tokens before `end`, as long as more than `spare` are available."""
    pages = request.place.pages
    while request.room(pool.page_size) < end and pool.available > spare:
        page = pool.allocate()
        assert page is not None, "an available page is not to be had"
        plan.entries.append(PageEntry(request.row, request.place.first_page + len(pages), page))
        pages.append(page)
