"""`Swaps` decides whether a preempted request keeps its pages in host memory, and brings them back; it moves no bytes.

Swapping a request out and in again moves each page twice; dropping its pages means computing all its tokens again.
The option that is faster by measured times is chosen.
"""

from __future__ import annotations

from collections.abc import Iterable

from headrace.engine.scheduling.memory.host_pages import HostPages
from headrace.engine.scheduling.memory.pages import PagePool
from headrace.engine.scheduling.memory.prefix import Prefixes
from headrace.engine.scheduling.memory.window import Window
from headrace.engine.scheduling.order.pace import Pace
from headrace.engine.scheduling.plan import StepPlan
from headrace.engine.scheduling.request import Request

__all__ = ["Swaps"]


class Swaps:
    """Swapping between one page pool and one host pool."""

    def __init__(self, host: HostPages, pool: PagePool, prefixes: Prefixes, pace: Pace, window: Window) -> None:
        """Move nothing yet; from now on, pages that `pool` evicts are kept in `host`."""
        self._window = window
        self.host = host
        self.is_on = host.num_places > 0
        """Whether the host has room for pages. If not, none is ever stored and no plan moves any."""
        self.count = 0
        """Number of requests swapped out so far."""
        self._pool = pool
        self._prefixes = prefixes
        self._pace = pace
        if self.is_on:
            pool.on_evict = host.keep
            host.log = pool.log

    def put_out(self, request: Request) -> None:
        """Store the pages of a request that is about to lose them, if that is worthwhile and there is room."""
        place, asked = request.place, request.asked
        first = max(place.first_page, self._window.first_page(request.planned))
        last = -(-request.planned // self._pool.page_size)
        pages = place.pages[first - place.first_page : last - place.first_page]
        if not pages or place.is_tainted or asked.holds or asked.pooling is not None:
            return
        if asked.alone and request.planned >= len(request.tokens):  # its last chunk must be computed again as a whole
            return
        moving = 2 * len(pages) * self.host.page_seconds
        if self.host.has_room(len(pages)) and moving < self._pace.prefill(request.planned):
            place.host_places = self.host.store(pages)
            place.first_page = first
            place.stored = request.planned
            self.count += 1

    def is_ready(self, request: Request) -> bool:
        """Return whether the next plan can fetch the stored pages of `request`."""
        return self.host.is_ready(request.place.host_places)

    def bring_in(self, request: Request) -> None:
        """Extend the pages of a starting request by those that host memory holds for it or its prefix."""
        size, pages = self._pool.page_size, request.place.pages
        if request.place.host_places:
            wanted, reach = request.place.host_places[len(pages) :], request.place.stored
            self.host.release(request.place.host_places[: len(pages)])
            request.place.host_places = []
            request.place.stored = 0
        elif request.room(size) == request.planned:
            keys, start = self._prefixes.usable(request), request.place.first_page + len(pages)
            end = start + self.host.reach(keys[start:])
            while end > start and not self._leaves_a_page(request, start, end):
                end -= 1
            reach = end * size
            # None of the fetched pages may be given back in the plan that fetches it: spills come before fetches.
            self._pool.release(request.place.slide_to(self._window.first_page(reach)))
            wanted = self.host.claim(keys[max(start, request.place.first_page) : end])
        else:
            return
        for place in wanted:  # allocation may evict and spill a page, but never to these places
            self.host.fetch(place, self._allocate(request))
        request.planned = max(request.planned, min(reach, len(request.tokens) - 1))
        request.computed = request.planned
        request.ready = request.planned
        first = max(request.place.registered, request.place.first_page)
        for index in range(first, min(request.planned // size, len(request.place.keys))):
            self._prefixes.remember(request, index)

    def drop(self, request: Request) -> None:
        """Drop the stored pages of `request`."""
        self.host.release(request.place.host_places)
        request.place.host_places = []
        request.place.stored = 0

    def fail(self, plan: StepPlan, requests: Iterable[Request]) -> None:
        """Drop the pages that a failed `plan` should have spilled."""
        self.host.settled(plan)
        lost = {place for _, place in plan.spills}
        self.host.forget(lost)
        for request in requests:
            if not lost.isdisjoint(request.place.host_places):
                self.drop(request)

    def _leaves_a_page(self, request: Request, start: int, end: int) -> bool:
        """Return whether a page is left to write if pages `start` to `end` of the sequence are fetched.

        The pages that slide out of the window meanwhile are free only if no other request holds them.
        """
        place, first = request.place, self._window.first_page(end * self._pool.page_size)
        freed = sum(self._pool.refs[page] == 1 for page in place.pages[: max(0, first - place.first_page)])
        return end - max(start, first) < self._pool.available + freed

    def _allocate(self, request: Request) -> int:
        page = self._pool.allocate()
        assert page is not None, "a request was started without room for it"
        request.place.pages.append(page)
        return page
