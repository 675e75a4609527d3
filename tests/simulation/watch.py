"""`StepWatch`: what must hold of every plan while others are in flight; looks at a scheduler and never changes it."""

from __future__ import annotations

from collections import deque
from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass, field

from headrace.engine.scheduling.load import live_tokens, num_swapped
from headrace.engine.scheduling.order.alone import CHUNK
from headrace.engine.scheduling.plan import StepPlan
from headrace.engine.scheduling.request import Request, State
from headrace.engine.scheduling.scheduler import Scheduler
from headrace.engine.testing import ScriptedStep

__all__ = ["Flight", "StepWatch"]


@dataclass(slots=True)
class Flight:
    """A planned, uncommitted step; `step` is None where the launch itself failed."""

    plan: StepPlan
    step: ScriptedStep | None = None
    touched: dict[int, tuple[Request, set[int]]] = field(default_factory=dict)
    """Request id -> the request and the pages that this step reads or writes for it."""


class StepWatch:
    """The steps in flight of one scheduler, and what was written for whom."""

    def __init__(self, scheduler: Scheduler, ended: Container[int], lengths: Mapping[int, int]) -> None:
        """Watch `scheduler`.

        Args:
            scheduler: The scheduler.
            ended: Ids of requests that have been given their end.
            lengths: How many tokens the device has of rows that speculate.
        """
        self._lengths = lengths
        self.flights: deque[Flight] = deque()
        self._scheduler = scheduler
        self._capacity = scheduler.capacity
        self._ended = ended
        self._roots: dict[int, bytes] = {}
        """Page -> the root of what was last written to it."""
        self._host_roots: dict[int, bytes] = {}
        self._was_alone = False
        """Whether the latest plan was one request's own."""
        self._guard_allocations()

    def owed(self) -> dict[int, int]:
        """Request id -> tokens that it owes, of those that may decode: to be asked before a plan."""
        running = self._live(State.RUNNING)
        return {r.id: r.known - r.planned for r in running if r.is_decodable and r.asked.pooling is None}

    def planned(self, plan: StepPlan, owed: dict[int, int], now: float) -> Flight:
        """See that `plan` may be launched, and count it as in flight."""
        flight = Flight(plan)
        new = {row.row for row in plan.new_rows}
        for work in plan.works:
            start = work.start
            if work.row in self._lengths and work.row not in new and work.start >= work.request.prompt_len:
                start = self._lengths[work.row] - 1  # of the device, which may be less far than the plan allows
            first = self._first_read(work.request, start)
            flight.touched[work.request.id] = (work.request, set(work.request.place.pages[first:]))
        self._check_plan(plan, owed, now)
        self._check_alone(plan)
        self._was_alone = plan.alone
        self._check_pages(plan)
        self.check_roots(plan)
        self.flights.append(flight)
        return flight

    def moved(self, plans: Iterable[StepPlan]) -> None:
        """Count plans without works, which are to be carried out now, as in flight."""
        for plan in plans:
            self.check_roots(plan)
            self.flights.append(Flight(plan))

    def check_roots(self, plan: StepPlan) -> None:
        """Nobody reads what was written for another tenant or adapter, in host memory or not."""
        roots, host = self._roots, self._host_roots
        host.update({place: roots[page] for page, place in plan.spills})
        for source, target in plan.copies:
            roots[target] = roots.get(source, b"nobody's")  # a page may move before it is written
        roots.update({page: host[place] for place, page in plan.fetches})
        size = self._capacity.page_size
        for request, start, count in self._spans(plan):
            begun, first = -(-start // size) - request.place.first_page, start // size - request.place.first_page
            pages = request.place.pages[: (start + count - 1) // size + 1 - request.place.first_page]
            for page in pages[self._first_read(request, start) : begun]:
                assert roots[page] == request.asked.root, f"r{request.id} reads page {page} of {roots[page]!r}"
            roots.update(dict.fromkeys(pages[first:], request.asked.root))

    @staticmethod
    def _least(request: Request, start: int) -> int:
        """The first position that a step just planned may write for `request`, where `start` may be an upper bound."""
        return request.ready if request.asked.speculates and request.latest_step >= 0 else start

    def _spans(self, plan: StepPlan) -> Iterable[tuple[Request, int, int]]:
        """The positions that a plan just made may write, from the least to the largest, of each of its requests."""
        drafts = dict(zip(plan.rows, plan.drafts, strict=False))
        for request, row, start, count, _ in plan.works:
            least = self._least(request, start)
            yield request, least, start + count + drafts.get(row, 0) - least

    def _first_read(self, request: Request, position: int) -> int:
        """Where in the pages of `request` those begin that attention reads from `position`."""
        window = self._capacity.window
        seen = 0 if window is None else max(0, position - window + 1)
        return max(0, seen // self._capacity.page_size - request.place.first_page)

    def settled(self) -> None:
        """See that what holds between any two events does."""
        scheduler, pool = self._scheduler, self._scheduler.pool
        scheduler.roster.check()
        assert pool.held + pool.available == pool.num_pages
        assert live_tokens(scheduler.roster) <= pool.held * pool.page_size
        for request in self._live(State.WAITING, State.RUNNING, State.PAUSED):
            assert request.id not in self._ended, f"r{request.id} lives on after its end"

    def check_empty(self, requests: Iterable[Request]) -> None:
        """See that nothing is left of `requests`, which are all there ever were; lets go of what somebody keeps."""
        scheduler = self._scheduler
        assert not self.flights and not scheduler.roster.requests, "something is left"
        assert scheduler.pool.held == 0 and scheduler.pool.available == scheduler.pool.num_pages
        for request in requests:
            while request.streams > 0:
                scheduler.drop_stream(request)
        assert not scheduler.pool._reservations and not scheduler.pool._kept, "a page is kept for nobody"
        assert (scheduler.roster.num_waiting, scheduler.roster.num_running, scheduler.roster.num_paused) == (0, 0, 0)
        assert num_swapped(scheduler.roster) == 0
        assert not scheduler.prefixes.promises and live_tokens(scheduler.roster) == 0
        for request in requests:
            assert not request.place.pages and request.row < 0 and not request.in_flight

    def _live(self, *states: State) -> list[Request]:
        return [request for request in self._scheduler.roster.requests.values() if request.state in states]

    def _check_plan(self, plan: StepPlan, owed: dict[int, int], now: float) -> None:
        """Budgets, decodes first, and nothing for requests that have ended or are paused."""
        works = plan.works
        assert works and len(works) <= self._capacity.max_rows
        computed = sum(work.num_tokens for work in works) + sum(plan.drafts)
        assert plan.tokens == computed <= self._capacity.max_batched_tokens
        assert len({work.row for work in works}) == len({work.request.id for work in works}) == len(works)
        new = {row.row for row in plan.new_rows}
        decodes = [owed.get(work.request.id) == 1 and work.row not in new for work in works]
        assert decodes == sorted(decodes, reverse=True), "a decode comes after a prefill"
        size = self._capacity.page_size
        drafts = dict(zip(plan.rows, plan.drafts, strict=False))
        assert len(plan.drafts) in (0, len(plan.decodes)) and max(plan.drafts, default=0) <= plan.depth
        for work in works:
            request = work.request
            guesses = drafts.get(work.row, 0)
            assert not guesses or request.asked.speculates, f"r{request.id} has drafts that it did not ask for"
            assert request.id not in self._ended, f"r{request.id} is planned after its end"
            assert request.asked.deadline is None or request.asked.deadline > now, f"r{request.id} is planned too late"
            assert request.state is State.RUNNING and work.row == request.row and work.num_tokens > 0
            assert work.start + work.num_tokens + guesses == request.planned <= request.room(size)
            assert work.samples == (request.planned == request.known - work.samples and request.asked.pooling is None)
        planned = {work.request.id for work in works}
        others_turn = self._was_alone != plan.alone
        for request in self._live(State.RUNNING):
            if (request.asked.alone and plan.alone) or (request.asked.alone != plan.alone and others_turn):
                continue
            if owed.get(request.id) == 1 and request.id not in planned and request.known < request.limit:
                short = request.planned == request.room(size) or request.forked
                short = short or self._scheduler.failures.is_cautious
                assert request.leaving or short, f"r{request.id}: a decode with a page to write to was left out"

    def _check_alone(self, plan: StepPlan) -> None:
        """What a deterministic request computes follows from its tokens, and nobody else computes in its steps."""
        assert plan.alone == any(work.request.asked.alone for work in plan.works)
        if not plan.alone:
            return
        ((request, _, start, count, _),) = plan.works
        chunk = min(CHUNK, self._capacity.max_batched_tokens)
        if start < request.prompt_len:
            assert start % chunk == 0 and count == min(chunk, request.prompt_len - start), "another chunk"
        else:
            assert count == 1, "tokens of a completion are computed as a prompt"

    def _check_pages(self, plan: StepPlan) -> None:
        """Nobody writes a page that another request holds, or that a step in flight uses for another request."""
        size, refs = self._capacity.page_size, self._scheduler.pool.refs
        destinations: set[int] = set()
        for source, destination in plan.copies:
            assert source not in destinations, "a copy reads what another of the same plan writes: their order matters"
            destinations.add(destination)
        in_use = [(flight, *entry) for flight in self.flights for entry in flight.touched.values()]
        for _, other, touched in in_use:
            if other.forked:  # the page it copied from is its own no longer
                touched.intersection_update(other.place.pages)
        for request, start, count in self._spans(plan):
            slid = request.place.first_page
            pages = request.place.pages[start // size - slid : (start + count - 1) // size + 1 - slid]
            for page in pages:
                assert refs[page] == 1, f"r{request.id} writes page {page}, which {refs[page]} requests hold"
            for flight, other, touched in in_use:
                assert other is request or touched.isdisjoint(pages), (
                    f"r{request.id} writes a page of r{other.id} that step {flight.plan.step} still uses"
                )

    def _guard_allocations(self) -> None:
        """Make the pool assert that it hands out no page that a step in flight uses, but those copied away from."""
        pool = self._scheduler.pool
        allocate = pool.allocate

        def guarded() -> int | None:
            page = allocate()
            for flight in self.flights:
                for other, touched in flight.touched.values():
                    copied_away = other.forked and other.row >= 0 and page not in other.place.pages
                    assert page not in touched or copied_away, (
                        f"page {page} of r{other.id} is handed out while step {flight.plan.step} uses it"
                    )
            return page

        pool.allocate = guarded  # type: ignore[method-assign]
