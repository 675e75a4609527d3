"""`Resizing`: how a scheduler comes by more pages, and what goes when it must do with fewer; moves no byte itself.

Only between steps, with nothing in flight. What has no room among the pages that stay is evicted if it is but cached,
and else swapped out or forgotten, as when pages run out; what has room there is moved there.
"""

from __future__ import annotations

from headrace.engine.scheduling.pages import PagePool
from headrace.engine.scheduling.plan import Capacity, PageEntry, StepPlan
from headrace.engine.scheduling.policy import Policy
from headrace.engine.scheduling.request import State
from headrace.engine.scheduling.roster import Roster
from headrace.engine.scheduling.swaps import Swaps

__all__ = ["Resizing"]

_MOST_COPIES = 256  # of a plan: a device may take as much memory again for what it copies at once


class Resizing:
    """Changes the number of pages of one pool."""

    def __init__(self, roster: Roster, pool: PagePool, swaps: Swaps, policy: Policy) -> None:
        """Change nothing yet."""
        self._roster = roster
        self._pool = pool
        self._swaps = swaps
        self._policy = policy

    @property
    def least_pages(self) -> int:
        """Pages without which some request that has been taken in could not go on, were it alone."""
        tokens = (r.known for r in self._roster.requests.values() if r.state is not State.FINISHED)
        return max(1, -(-max(tokens, default=1) // self._pool.page_size))

    def set_limits(self, capacity: Capacity) -> None:
        """Let every request grow to what it was asked for, as far as `capacity` holds it."""
        for request in self._roster.requests.values():
            room = 1 if request.pooling is None else 0
            request.limit = min(request.asked, capacity.check_length(0, room) + 1 - room)
            request.smooth = min(request.smooth, max(0, request.limit - 2))

    def fit(self, num_pages: int, step: int, now: float, *, forget: bool) -> list[StepPlan]:
        """Have so many pages.

        Args:
            num_pages: How many.
            step: The first that is not planned yet.
            now: As for `Scheduler.plan`.
            forget: Give up what the host holds of pages, too.

        Returns:
            Plans without works, from `step` on, that save what would be lost with the pages that go.
        """
        if num_pages >= self._pool.num_pages:
            self._pool.grow(num_pages)
            if forget:
                self._forget()
            return []
        while self._pool.held > num_pages:
            holders = self._roster.paused_holders() or self._roster.running
            self._roster.preempt(max(holders, key=lambda request: self._policy.standing(request, now)))
        moved = self._pool.shrink(num_pages)
        if forget:
            self._forget()
        copies = list(moved.items())
        plan = StepPlan(step, entries=self._follow(moved), copies=copies[:_MOST_COPIES])
        self._swaps.host.load(plan)
        if not (plan.spills or plan.copies):
            return []
        starts = range(_MOST_COPIES, len(copies), _MOST_COPIES)
        more = (StepPlan(0, copies=copies[start : start + _MOST_COPIES]) for start in starts)
        plans = [plan, *more]
        for number, each in enumerate(plans, step):
            each.step = number
        return plans

    def _follow(self, moved: dict[int, int]) -> list[PageEntry]:
        """Change the page tables by what has `moved`."""
        entries = []
        for request in self._roster.requests.values():
            for place, page in enumerate(request.pages):
                if page in moved:
                    request.pages[place] = moved[page]
                    entries.append(PageEntry(request.row, place, moved[page]))
        return entries

    def _forget(self) -> None:
        for request in self._roster.requests.values():
            self._swaps.drop(request)
        self._swaps.host.forget(range(self._swaps.host.num_places))
