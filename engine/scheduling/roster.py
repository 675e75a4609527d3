"""`Roster` records which request waits, runs or pauses, on which row and with which pages; it never decides which.

Each change of a request's state is one method here or, for requests that are paused or preempted, in suspension.py.
Rows and pages of a request with launched steps are released when the last of them is committed; until then the request
counts as draining.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterable, Sequence

from headrace.adapters.slots import SlotTable
from headrace.engine.errors import RequestFailed
from headrace.engine.events import FinishReason
from headrace.engine.scheduling.invariants import check_scheduler
from headrace.engine.scheduling.memory.pages import PagePool
from headrace.engine.scheduling.memory.prefix import Prefixes
from headrace.engine.scheduling.memory.swaps import Swaps
from headrace.engine.scheduling.order.waiting import Waiting
from headrace.engine.scheduling.plan import Capacity, Emission, RowOptions
from headrace.engine.scheduling.policy import Policy
from headrace.engine.scheduling.request import Request, State
from headrace.engine.scheduling.speculation.runs import further_works

__all__ = ["Roster", "service_order"]


def service_order(request: Request) -> tuple[int, int, int]:
    """Return the key by which running requests are sorted."""
    return request.order


class Roster:
    """All requests of one scheduler that have not ended or still hold a row or pages."""

    def __init__(
        self, capacity: Capacity, pool: PagePool, prefixes: Prefixes, policy: Policy, swaps: Swaps, slots: SlotTable
    ) -> None:
        """Start with no requests and every row free."""
        self.capacity = capacity
        """Limits of the device; the number of pages may change while requests go on."""
        self.step = 0
        """Number of the next step that is planned."""
        self.now = 0.0
        """Time of the latest plan in seconds, on the clock of `Request.arrived`."""
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
        insort(self.running, request, key=service_order)
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

    def charge(self, further: Iterable[tuple[Request, int]]) -> None:
        """Charge each request for so many tokens more than the one that was charged when a step was planned.

        The policy is given the work items as it asks for them: one that charges nobody costs nothing here.
        """
        self._policy.served(work for request, tokens in further for work in further_works(request, tokens))

    def finish(self, request: Request, reason: FinishReason) -> None:
        """End `request`, which has not ended, with `reason`."""
        self.end(request)
        request.finish_reason = reason

    def fail(self, request: Request, error: RequestFailed) -> Emission:
        """End `request` with `error`."""
        request.failed = True
        self.end(request)
        return Emission(request, None, None, error)

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
        """Release a request that has ended, when its last launched step has been committed."""
        self.draining -= 1
        self._release(request)

    def _release(self, request: Request) -> None:
        if (
            request.streams
            and request.place.pages
            and not (request.failed or request.leaving or request.place.is_tainted)
        ):
            self._prefixes.turns.keep(request)
        if request.place.host_places:
            self._swaps.drop(request)
        self.give_back(request)
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
            self._prefixes.turns.drop_stream(before)

    def give_back(self, request: Request) -> None:
        """Take the row and the pages from a request that has nothing in flight."""
        self._pool.release(request.place.pages)
        request.place.pages = []
        if request.row >= 0:
            self.free_rows.append(request.row)
            if RowOptions.needed(request.asked):
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
