"""`Resizing` changes how many pages a scheduler has, and decides which pages go; it moves no bytes itself.

It is used between steps, with nothing in flight. Pages that do not fit are evicted if only cached; their holders are
preempted, and swapped out or recomputed, if too many pages are held; all other pages move to free places.
"""

from __future__ import annotations

from dataclasses import replace

from headrace.engine.scheduling.memory.pages import PagePool
from headrace.engine.scheduling.memory.swaps import Swaps
from headrace.engine.scheduling.memory.window import Window, slid_entries
from headrace.engine.scheduling.plan import Capacity, PageEntry, StepPlan
from headrace.engine.scheduling.request import State
from headrace.engine.scheduling.roster import Roster
from headrace.engine.scheduling.suspension import Suspension

__all__ = ["Resizing"]

_MOST_COPIES = 256  # per plan: a device may need as much extra memory for the pages that it copies at once


class Resizing:
    """Resizing of one page pool."""

    def __init__(self, roster: Roster, suspension: Suspension, pool: PagePool, swaps: Swaps, window: Window) -> None:
        """Change nothing yet."""
        self._window = window
        self._roster = roster
        self._pool = pool
        self._swaps = swaps
        self._suspension = suspension
        self.sleep_level = 0
        """Level of sleep: above 0, the scheduler has no pages and plans nothing."""

    @property
    def least_pages(self) -> int:
        """Least number of pages with which each accepted request could go on if it were alone."""
        size = self._pool.page_size
        return max(
            (
                -(-request.known // size) if request.asked.alone else self._window.fewest_pages(request.known)
                for request in self._roster.requests.values()
                if request.state is not State.FINISHED
            ),
            default=1,
        )

    def resize(self, num_pages: int) -> list[StepPlan]:
        """Change the number of pages, with nothing in flight; no token is lost, and the limits of requests follow.

        Args:
            num_pages: At least `least_pages`. The runner has more before this is called, and fewer afterwards.

        Returns:
            Plans without work items, to be carried out in order before pages are removed.
        """
        self._roster.capacity = replace(self._roster.capacity, num_pages=num_pages)
        self._set_limits(self._roster.capacity)
        return [] if self.sleep_level else self._fit(num_pages)

    def fall_asleep(self, level: int) -> list[StepPlan]:
        """Give up every page and plan nothing until `wake_up`, with nothing in flight; requests wait, new ones too.

        Args:
            level: From 2 on, pages in host memory are dropped as well, since the weights may change.

        Returns:
            Plans without work items, to be carried out in order before pages are removed.
        """
        self.sleep_level = level
        return self._fit(0, forget=level > 1)

    def wake_up(self) -> None:
        """Have pages again, and plan."""
        self.sleep_level = 0
        self._fit(self._roster.capacity.num_pages)

    def _set_limits(self, capacity: Capacity) -> None:
        """Raise or lower the limit of every request to what was asked for, as far as `capacity` permits."""
        for request in self._roster.requests.values():
            room = 1 if request.asked.pooling is None else 0
            request.limit = min(
                request.asked.limit, capacity.check_length(0, room, whole=request.asked.alone) + 1 - room
            )
            request.plain_until = min(request.plain_until, max(0, request.limit - 2))

    def _fit(self, num_pages: int, *, forget: bool = False) -> list[StepPlan]:
        """Change the number of pages, and drop pages in host memory, too, if these are to `forget`.

        Returns:
            Plans without work items that save the pages that would be lost.
        """
        if num_pages >= self._pool.num_pages:
            self._pool.grow(num_pages)
            if forget:
                self._forget()
            return []
        roster = self._roster
        while self._pool.held > num_pages:
            self._suspension.preempt(self._suspension.last())
        moved = self._pool.shrink(num_pages)
        if forget:
            self._forget()
        copies = list(moved.items())
        entries = self._follow(moved)
        plans: list[StepPlan] = []
        for start in range(0, max(1, len(copies)), _MOST_COPIES):
            part = copies[start : start + _MOST_COPIES]
            follow = [entry for _, page in part for entry in entries.get(page, ())]
            plans.append(StepPlan(roster.step + len(plans), entries=follow, copies=part))
        plans[0].entries += self._slid_entries()
        self._swaps.host.load(plans[0])  # spills read pages before they are overwritten
        if not (copies or plans[0].spills or plans[0].entries):
            return []
        roster.step += len(plans)
        return plans

    def _slid_entries(self) -> list[PageEntry]:
        """Return entries in place of those of pages that slid out of the window, which may no longer exist."""
        return [entry for request in self._roster.requests.values() for entry in slid_entries(request)]

    def _follow(self, moved: dict[int, int]) -> dict[int, list[PageEntry]]:
        """Update the block tables by `moved`; return the page entries for each new page."""
        entries: dict[int, list[PageEntry]] = {}
        for request in self._roster.requests.values():
            for place, page in enumerate(request.place.pages):
                if page in moved:
                    page = request.place.pages[place] = moved[page]
                    entry = PageEntry(request.row, request.place.first_page + place, page)
                    entries.setdefault(page, []).append(entry)
        return entries

    def _forget(self) -> None:
        for request in self._roster.requests.values():
            self._swaps.drop(request)
        self._swaps.host.forget(range(self._swaps.host.num_places))
