"""`Growth` prepares a request for a step that is being planned, above all by making its pages writable."""

from __future__ import annotations

from headrace.engine.scheduling.memory.pages import PagePool
from headrace.engine.scheduling.memory.prefix import Prefixes
from headrace.engine.scheduling.memory.window import Window
from headrace.engine.scheduling.plan import GivenTokens, PageEntry, StepPlan
from headrace.engine.scheduling.policy import Policy
from headrace.engine.scheduling.request import Request
from headrace.engine.scheduling.roster import Roster

__all__ = ["Growth"]


class Growth:
    """Page allocation for running requests: takes free pages, and preempts requests last in order if there are none."""

    def __init__(self, roster: Roster, pool: PagePool, prefixes: Prefixes, window: Window, policy: Policy) -> None:
        """Allocate pages of `pool`, preempting requests of `roster` in the order of `policy`.

        Args:
            roster: The requests.
            pool: The pages.
            prefixes: Offers pages to other requests before their holder gives them back.
            window: The attention window, behind which pages are given back.
            policy: Order of service.
        """
        self._prefixes = prefixes
        self._window = window
        self._roster = roster
        self._pool = pool
        self._policy = policy

    def make_ready(self, plan: StepPlan, request: Request, count: int, now: float) -> int:
        """Prepare `request` for its next `count` tokens: allocate pages, and send tokens that the host chose.

        Returns:
            Number of these tokens that may be planned.
        """
        if request.planned + count > request.room(self._pool.page_size) or request.forked:
            count = self.grow(plan, request, count, now)
        if count and (request.unsent or request.is_held):
            start = len(request.tokens) - request.unsent
            plan.given.append(GivenTokens(request.row, start, request.tokens[start:]))
            request.unsent = 0
            request.is_held = False
        return count

    def grow(self, plan: StepPlan, request: Request, count: int, now: float) -> int:
        """Make pages writable for `count` tokens from `request.planned`; return how many of them have room."""
        self._slide(request)
        size = self._pool.page_size
        pages = request.place.pages
        index = request.planned // size - request.place.first_page
        if request.forked and index < len(pages) and not self._pool.is_writable(pages[index]):
            page = self._obtain(request, now)
            if page is None:
                return 0
            plan.copies.append((pages[index], page))
            request.place.copied = plan.step
            self._pool.release(pages[index : index + 1])
            pages[index] = page
            plan.entries.append(PageEntry(request.row, request.place.first_page + index, page))
        while request.room(size) < request.planned + count:
            page = self._obtain(request, now)
            if page is None:
                break
            plan.entries.append(PageEntry(request.row, request.place.first_page + len(pages), page))
            pages.append(page)
        return min(count, request.room(size) - request.planned)

    def _slide(self, request: Request) -> None:
        """Give back the pages that no further step of `request` reads, and none in flight."""
        first = self._window.first_page(request.computed)
        if first > request.place.first_page:
            self._prefixes.offer(request)
            self._pool.release(request.place.slide_to(first))

    def _obtain(self, request: Request, now: float) -> int | None:
        """Return a page for `request`, preempting requests after it in order; None if it must wait for one."""
        page = self._pool.allocate()
        while page is None and self._preempt_after(request, now):
            page = self._pool.allocate()
        return page

    def _preempt_after(self, request: Request, now: float) -> bool:
        """Preempt the last request in order, if it is not `request`; return whether its pages were freed at once."""
        roster = self._roster
        if roster.draining:  # pages are about to be freed: taking more than needed would thrash
            return False
        victim = max(roster.paused_holders() or roster.running, key=lambda other: self._policy.standing(other, now))
        return victim is not request and roster.preempt(victim)
