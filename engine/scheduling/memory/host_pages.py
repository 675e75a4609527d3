"""`HostPages` records which pages are kept in host memory for lack of room on the device; it moves no bytes itself.

A place is free, holds a page of a swapped request, or holds an evicted page of a cached prefix (the least recently
spilled is evicted first). The moves themselves are part of a plan: spills before everything else, fetches after its
copies. So a page may be reused in the plan that spills it, but a place may not be refilled in the plan that fetches
from it, and a page spilled by an uncommitted step may not be fetched by another, since the step may fail.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence

from headrace.engine.scheduling.memory.page_log import PageLog
from headrace.engine.scheduling.plan import StepPlan

__all__ = ["HostPages"]


class HostPages:
    """A fixed number of places in host memory, each for one page."""

    def __init__(self, num_places: int, page_seconds: float = 0.0) -> None:
        """Start empty.

        Args:
            num_places: Pages that the host has room for; 0 turns swapping off.
            page_seconds: Seconds that moving one page takes, one way.
        """
        self.num_places = num_places
        self.page_seconds = page_seconds
        self._free = list(range(num_places - 1, -1, -1))
        self._cached: OrderedDict[bytes, int] = OrderedDict()
        self._spent: list[int] = []
        self._spills: dict[int, int] = {}
        self._fetches: list[tuple[int, int]] = []
        self.log: PageLog | None = None
        """Log that is notified of prefixes stored in host memory or removed from it; None for no log."""
        self._in_flight: dict[int, int] = {}
        """Place -> the latest step that spills to it, until that step is committed."""

    @property
    def used(self) -> int:
        """Number of places that hold a page."""
        return self.num_places - len(self._free) - len(self._spent)

    def has_room(self, count: int) -> bool:
        """Return whether `count` pages can be stored."""
        return count <= len(self._free) + len(self._cached)

    def store(self, pages: Sequence[int]) -> list[int]:
        """Spill `pages` in the next plan; return the places that will hold them. There must be room."""
        return [self._spill(page) for page in pages]

    def keep(self, page: int, key: bytes) -> None:
        """Spill a page whose prefix `key` the device is about to forget, if there is room."""
        if key not in self._cached and self.has_room(1):
            self._cached[key] = self._spill(page)
            if self.log is not None and self.log.is_on:
                self.log.spilled(key)

    def reach(self, keys: Sequence[bytes]) -> int:
        """Return how many of the leading `keys` could be fetched now."""
        for count, key in enumerate(keys):
            place = self._cached.get(key)
            if place is None or place in self._in_flight:
                return count
        return len(keys)

    def claim(self, keys: Iterable[bytes]) -> list[int]:
        """Return the places of `keys`, all within `reach`; the caller must fetch each of them."""
        return [self._forget(key) for key in keys]

    def is_ready(self, places: Iterable[int]) -> bool:
        """Return whether the next plan can fetch from all of `places`."""
        return self._in_flight.keys().isdisjoint(places)

    def fetch(self, place: int, page: int) -> None:
        """Copy the content of `place` to `page` in the next plan; the place is free afterwards."""
        self._fetches.append((place, page))
        self._spent.append(place)

    def release(self, places: Iterable[int]) -> None:
        """Free `places` and drop their content."""
        for place in places:
            self._spills.pop(place, None)
            self._spent.append(place)

    def forget(self, places: Iterable[int]) -> None:
        """Drop cached prefixes that are in `places`, whose content is undefined."""
        lost = set(places)
        for key in [key for key, place in self._cached.items() if place in lost]:
            self.release([self._forget(key)])

    def load(self, plan: StepPlan) -> None:
        """Add all pending moves to `plan`; afterwards the places that are fetched from are free."""
        plan.spills = [(page, place) for place, page in self._spills.items()]
        plan.fetches = self._fetches
        self._fetches = []
        self._in_flight.update(dict.fromkeys(self._spills, plan.step))
        self._spills.clear()
        self._free += self._spent
        self._spent.clear()

    def settled(self, plan: StepPlan) -> None:
        """Take note that `plan` was committed or has failed."""
        for _, place in plan.spills:
            if self._in_flight.get(place) == plan.step:
                del self._in_flight[place]

    def check(self, holders: Iterable[Sequence[int]]) -> None:
        """Assert that every place is free, cached or held by one of `holders`, and only one of these.

        Raises:
            AssertionError: A place is lost or doubly owned, which is a defect of headrace.
        """
        held = [place for places in holders for place in places]
        places = [*self._free, *self._spent, *self._cached.values(), *held]
        assert sorted(places) == list(range(self.num_places)), "places of the host pool are lost or doubly owned"
        assert self._spills.keys() <= {*self._cached.values(), *held}, "a spill that nobody wants"

    def _spill(self, page: int) -> int:
        place = self._free.pop() if self._free else self._forget(next(iter(self._cached)))
        self._spills[place] = page  # replaces an earlier spill to this place
        return place

    def _forget(self, key: bytes) -> int:
        """Stop offering a prefix; return its place."""
        if self.log is not None and self.log.is_on:
            self.log.removed(key, "host")
        return self._cached.pop(key)
