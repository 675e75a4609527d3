"""`Roster` records which request waits, runs or pauses, on which row and with which pages; it never decides which.

Each change of a request's state is one method here. Rows and pages of a request with launched steps are released when
the last of them is committed; until then the request counts as draining.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Sequence

from headrace.adapters.slots import SlotTable
from headrace.engine.errors import RequestFailed
from headrace.engine.events import FinishReason
from headrace.engine.scheduling.invariants import check_scheduler
from headrace.engine.scheduling.memory.pages import PagePool
from headrace.engine.scheduling.memory.prefix import Prefixes
from headrace.engine.scheduling.memory.swaps import Swaps
from headrace.engine.scheduling.order.waiting import Waiting
from headrace.engine.scheduling.plan import Capacity, Emission
from headrace.engine.scheduling.policy import Policy
from headrace.engine.scheduling.request import Request, State

__all__ = ["Roster"]


def _order(request: Request) -> tuple[int, int, int]:
    return request.order


class Roster:
    """All requests of one scheduler that have not ended or still hold a row or pages."""

    def __init__(
        self, capacity: Capacity, pool: PagePool, prefixes: Prefixes, policy: Policy, swaps: Swaps, slots: SlotTable
    ) -> None:
        """Start with no requests and every row free."""
        self.requests: dict[int, Request] = {}
        """Every request that waits or still holds a row or pages, by its id."""
        self.waiting = Waiting(policy)
        self.running: list[Request] = []
        """Requests that are planned, by `Request.order`."""
        self.paused: list[Request] = []
        self.free_rows = list(range(capacity.max_rows - 1, -1, -1))
        self.left_rows: list[int] = []
        """Rows that requests with options have left since the scheduler last read and cleared this list."""
        self.draining = 0
        """Number of requests that ended or were preempted and whose row and pages are freed with their last launched
        step."""
        self.preemptions = 0
        """Number of times that a request lost its row and pages to another request."""
        self._max_rows = capacity.max_rows
        self._policy = policy
        self._pool = pool
        self._prefixes = prefixes
        self._slots = slots
        self._swaps = swaps
        self._arrivals = 0

    def add(self, request: Request) -> None:
        """Queue a new request and give it an id."""
        request.id = self._arrivals
        self._arrivals += 1
        self.requests[request.id] = request
        self._policy.arrived(request)
        if request.before is not None:
            request.before.streams += 1
        self.waiting.add(request)
        if request.asked.version is not None:
            self._slots.enter(request.asked.version)

    def start(self, request: Request, pages: Sequence[int]) -> None:
        """Give a waiting request a free row that starts with `pages`."""
        self.waiting.remove(request)
        insort(self.running, request, key=_order)
        for page in pages:
            self._pool.share(page)
        request.state = State.RUNNING
        request.row = self.free_rows.pop()
        if request.asked.version is not None:
            self._slots.hold(request.asked.version)
        request.place.pages = list(pages)
        request.planned = min(request.place.found, len(request.tokens) - 1)
        request.computed = request.planned
        request.ready = request.planned
        request.place.registered = request.planned // self._pool.page_size
        if self._swaps.is_on:
            self._swaps.bring_in(request)
        request.place.registered = request.planned // self._pool.page_size
        self._prefixes.promise(request)
        self._policy.started(request)

    def pause(self, request: Request) -> None:
        """Stop planning `request`; do nothing if it is paused or has ended."""
        if request.state is State.WAITING:
            self.waiting.remove(request)
        elif request.state is State.RUNNING:
            if not request.leaving:
                self.running.remove(request)
            self._prefixes.withdraw(request)
        else:
            return
        request.state = State.PAUSED
        self.paused.append(request)

    def resume(self, request: Request) -> None:
        """Undo `pause`; do nothing in any other state."""
        if request.state is not State.PAUSED:
            return
        self.paused.remove(request)
        if request.row < 0:
            request.state = State.WAITING
            self.waiting.add(request)
            return
        request.state = State.RUNNING
        if not request.leaving:
            insort(self.running, request, key=_order)
            self._prefixes.promise(request)

    def paused_holders(self) -> list[Request]:
        """Return the paused requests that hold a row and are not being preempted."""
        return [request for request in self.paused if request.row >= 0 and not request.leaving]

    def preempt(self, victim: Request) -> bool:
        """Send `victim` back to wait, now or at its last commit; return True if now."""
        self.preemptions += 1
        victim.preemptions += 1
        victim.plain_until = 0
        self._prefixes.withdraw(victim)
        if victim.state is State.RUNNING:
            self.running.remove(victim)
        if victim.in_flight:
            victim.leaving = True
            self.draining += 1
            return False
        self._requeue(victim)
        return True

    def finish(self, request: Request, reason: FinishReason) -> None:
        """End `request`, which has not ended, with `reason`."""
        self.end(request)
        request.finish_reason = reason

    def fail(self, request: Request, error: RequestFailed) -> Emission:
        """End `request` with `error`."""
        request.failed = True
        self.end(request)
        return Emission(request, None, None, error)

    def taint(self, pages: set[int], failed: set[Request]) -> None:
        """Preempt requests that hold one of `pages`, which a failed step wrote, or that forked one of its requests.

        Both sets grow by the pages and requests that were computed from them. All of these requests start over.
        """
        for request in list(self.requests.values()):
            first = next((index for index, page in enumerate(request.place.pages) if page in pages), None)
            if first is None and (request.leader not in failed or not request.place.pages):
                continue
            pages.update(request.place.pages[first or 0 :])
            failed.add(request)  # a request that forked it may hold a copy of such a page
            request.place.is_tainted = True
            if request.state is not State.FINISHED:
                request.discard = request.in_flight
                if not request.leaving:
                    self.preempt(request)
        for page in pages:
            self._pool.forget(page)

    def end(self, request: Request) -> None:
        """Remove `request` from every queue; its pages and row are released once none of its steps is in flight."""
        self._prefixes.withdraw(request)
        if request.state is State.WAITING:
            self.waiting.remove(request)
        elif request.state is State.PAUSED:
            self.paused.remove(request)
        elif not request.leaving:
            self.running.remove(request)
        request.state = State.FINISHED
        request.plain_until = 0
        self._policy.ended(request)
        if request.in_flight and not request.leaving:
            self.draining += 1
        elif not request.in_flight:
            self.draining -= request.leaving
            self._release(request)

    def release_drained(self, request: Request) -> None:
        """Release or requeue a request that ended or was preempted, when its last launched step has been committed."""
        self.draining -= 1
        if request.state is State.FINISHED:
            self._release(request)
        else:
            self._requeue(request)

    def _requeue(self, request: Request) -> None:
        """Release the row and pages of a preempted request, swapping out pages if worthwhile, and queue it again."""
        self._swaps.put_out(request)
        self._give_back(request)
        request.leaving = False
        request.place.is_tainted = False
        request.awaited = -1
        request.unsent = 0
        request.is_held = False
        request.known = len(request.tokens)
        request.planned = 0
        request.computed = 0
        request.ready = 0
        request.place.registered = 0
        if request.state is State.RUNNING:
            request.state = State.WAITING
            self.waiting.add(request)

    def _release(self, request: Request) -> None:
        if (
            request.streams
            and request.place.pages
            and not (request.failed or request.leaving or request.place.is_tainted)
        ):
            self._prefixes.keep(request)
        if request.place.host_places:
            self._swaps.drop(request)
        self._give_back(request)
        self._drop_previous_turn(request)
        request.leader = None  # a chain of continued requests would otherwise keep all earlier ones alive
        if request.asked.version is not None:
            self._slots.leave(request.asked.version)
        del self.requests[request.id]

    def _drop_previous_turn(self, request: Request) -> None:
        """Stop keeping the pages of the previous turn of a request that has ended."""
        before = request.before
        request.before = None
        if before is not None:
            self._prefixes.drop_stream(before)

    def _give_back(self, request: Request) -> None:
        self._pool.release(request.place.pages)
        request.place.pages = []
        if request.row >= 0:
            self.free_rows.append(request.row)
            if request.asked.has_options:
                self.left_rows.append(request.row)
            request.row = -1
            if request.asked.version is not None:
                self._slots.drop(request.asked.version)

    @property
    def num_waiting(self) -> int:
        """Number of requests that hold neither row nor pages and are not paused."""
        return len(self.waiting)

    @property
    def num_running(self) -> int:
        """Number of requests that are being planned."""
        return len(self.running)

    @property
    def num_paused(self) -> int:
        """Number of requests that are paused because their reader is behind."""
        return len(self.paused)

    @property
    def num_swapped(self) -> int:
        """Number of waiting or paused requests whose pages are in host memory."""
        return sum(1 for request in self.requests.values() if request.place.host_places)

    def live_tokens(self) -> int:
        """Number of distinct tokens whose keys and values requests hold; a page that several share counts once."""
        size = self._pool.page_size
        filled: dict[int, int] = {}
        for request in self.requests.values():
            for index, page in enumerate(request.place.pages, request.place.first_page):
                filled[page] = max(filled.get(page, 0), min(size, request.planned - index * size))
        return sum(filled.values())

    def check(self) -> None:
        """Assert every invariant of requests, rows and pages (invariants.py lists them).

        Raises:
            AssertionError: An invariant does not hold, which is a defect of headrace.
        """
        self.waiting.check()
        self._slots.check()
        self._swaps.host.check(request.place.host_places for request in self.requests.values())
        check_scheduler(
            self._pool,
            self.requests.values(),
            waiting=list(self.waiting),
            running=self.running,
            paused=self.paused,
            free_rows=self.free_rows,
            max_rows=self._max_rows,
            draining=self.draining,
            promises=self._prefixes.promises,
        )
