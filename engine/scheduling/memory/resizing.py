"""`Resizing`: how a scheduler comes by more pages, and what goes when it must do with fewer; moves no byte itself.

Only between steps, with nothing in flight. What has no room among the pages that stay is evicted if it is but cached,
and else swapped out or forgotten, as when pages run out; what has room there is moved there.
"""

from __future__ import annotations

from headrace.engine.scheduling.memory.pages import PagePool
from headrace.engine.scheduling.memory.swaps import Swaps
from headrace.engine.scheduling.plan import Capacity, PageEntry, StepPlan
from headrace.engine.scheduling.policy import Policy
from headrace.engine.scheduling.request import State
from headrace.engine.scheduling.roster import Roster

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
        entries = self._follow(moved)
        plans: list[StepPlan] = []
        for start in range(0, max(1, len(copies)), _MOST_COPIES):
            part = copies[start : start + _MOST_COPIES]
            follow = [entry for _, page in part for entry in entries.get(page, ())]
            plans.append(StepPlan(step + len(plans), entries=follow, copies=part))
        self._swaps.host.load(plans[0])  # what leaves is read before its page may be written
        return plans if copies or plans[0].spills else []

    def _follow(self, moved: dict[int, int]) -> dict[int, list[PageEntry]]:
        """Change the page tables by what has `moved`; the entries of each page in its new place."""
        entries: dict[int, list[PageEntry]] = {}
        for request in self._roster.requests.values():
            for place, page in enumerate(request.pages):
                if page in moved:
                    page = request.pages[place] = moved[page]
                    entries.setdefault(page, []).append(PageEntry(request.row, place, page))
        return entries

    def _forget(self) -> None:
        for request in self._roster.requests.values():
            self._swaps.drop(request)
        self._swaps.host.forget(range(self._swaps.host.num_places))
