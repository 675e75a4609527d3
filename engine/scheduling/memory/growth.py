"""`Growth`: makes a request ready for a step that is planned, above all its pages writable; plans no tokens."""

from __future__ import annotations

from headrace.engine.scheduling.memory.pages import PagePool
from headrace.engine.scheduling.plan import GivenTokens, PageEntry, StepPlan
from headrace.engine.scheduling.policy import Policy
from headrace.engine.scheduling.request import Request
from headrace.engine.scheduling.roster import Roster

__all__ = ["Growth"]


class Growth:
    """Takes pages from a pool and, where it is empty, from those that come last in the order of a policy."""

    def __init__(self, roster: Roster, pool: PagePool, policy: Policy) -> None:
        """Preempt requests of `roster` for pages of `pool`."""
        self._roster = roster
        self._pool = pool
        self._policy = policy

    def make_ready(self, plan: StepPlan, request: Request, count: int, now: float) -> int:
        """Have `request` ready for its next `count` tokens: pages of its own, and on the device what the host chose.

        Returns:
            How many of them may be planned.
        """
        if request.planned + count > len(request.pages) * self._pool.page_size or request.forked:
            count = self.grow(plan, request, count, now)
        if count and (request.unsent or request.is_held):
            start = len(request.tokens) - request.unsent
            plan.given.append(GivenTokens(request.row, start, request.tokens[start:]))
            request.unsent, request.is_held = 0, False
        return count

    def grow(self, plan: StepPlan, request: Request, count: int, now: float) -> int:
        """Make pages writable for `count` tokens from `request.planned`; how many of them have room."""
        size = self._pool.page_size
        pages = request.pages
        index = request.planned // size
        if request.forked and index < len(pages) and not self._pool.is_writable(pages[index]):
            page = self._obtain(request, now)
            if page is None:
                return 0
            plan.copies.append((pages[index], page))
            request.copied = plan.step
            self._pool.release(pages[index : index + 1])
            pages[index] = page
            plan.entries.append(PageEntry(request.row, index, page))
        while len(pages) * size < request.planned + count:
            page = self._obtain(request, now)
            if page is None:
                break
            plan.entries.append(PageEntry(request.row, len(pages), page))
            pages.append(page)
        return min(count, len(pages) * size - request.planned)

    def _obtain(self, request: Request, now: float) -> int | None:
        """A page for `request`, preempting whoever comes after it; None if it must wait for one."""
        page = self._pool.allocate()
        while page is None and self._preempt_after(request, now):
            page = self._pool.allocate()
        return page

    def _preempt_after(self, request: Request, now: float) -> bool:
        """Preempt the last in order behind `request`; True if its pages came back at once."""
        roster = self._roster
        if roster.draining:  # pages are on their way back: taking more than is needed would thrash
            return False
        victim = max(roster.paused_holders() or roster.running, key=lambda other: self._policy.standing(other, now))
        return victim is not request and roster.preempt(victim)
