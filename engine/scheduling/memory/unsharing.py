"""`unshare` gives a request pages of its own in place of shared ones that it is about to write; takes none itself.

Next to read: pages.py, which knows who holds a page.
"""

from __future__ import annotations

from collections.abc import Callable

from headrace.engine.scheduling.memory.pages import PagePool
from headrace.engine.scheduling.plan import PageEntry, StepPlan
from headrace.engine.scheduling.request import Request

__all__ = ["unshare"]


def unshare(plan: StepPlan, request: Request, pool: PagePool, obtain: Callable[[Request], int | None]) -> bool:
    """Copy the pages that `request` may write and others hold, too.

    None is copied unless the next token has room as well: a plan that stays empty is dropped, with its copies.

    Args:
        plan: Is told of the copies and of the entries that change.
        request: Runs, and may share pages with requests that it was forked from or that were forked from it.
        pool: The pages.
        obtain: Returns a page for a request, which it may take from others, or None.

    Returns:
        Whether there were pages for all of it.
    """
    pages, first = request.place.pages, request.place.first_page
    start = request.sure // pool.page_size - first
    shared = [index for index in range(start, len(pages)) if not pool.is_writable(pages[index])]
    fresh: list[int] = []
    while len(fresh) < len(shared) + (bool(shared) and request.room(pool.page_size) <= request.planned):
        page = obtain(request)
        if page is None:
            pool.release(fresh)
            return False
        fresh.append(page)
    for index in shared:
        if not pool.is_writable(pages[index]):  # still: others may have been preempted for the fresh pages
            page = fresh.pop()
            plan.copies.append((pages[index], page))
            request.place.copied = plan.step
            pool.release(pages[index : index + 1])
            pages[index] = page
            plan.entries.append(PageEntry(request.row, first + index, page))
    pool.release(fresh)
    return True
