"""`Admission` decides which waiting requests may start and with which pages; it assigns no rows and plans nothing.

Next to read: roster.py, which moves the requests that may start.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from headrace.adapters.slots import SlotTable
from headrace.engine.scheduling.memory.pages import PagePool
from headrace.engine.scheduling.memory.prefix import Prefixes
from headrace.engine.scheduling.memory.swaps import Swaps
from headrace.engine.scheduling.memory.window import Window
from headrace.engine.scheduling.order.overtaking import Overtaking
from headrace.engine.scheduling.order.pace import Pace
from headrace.engine.scheduling.plan import StepPlan
from headrace.engine.scheduling.policy import Policy
from headrace.engine.scheduling.request import Request
from headrace.engine.scheduling.roster import Roster
from headrace.engine.scheduling.suspension import Suspension

__all__ = ["Admission"]


class Admission:
    """Admission control: finds room for waiting requests, in the order of a policy."""

    def __init__(
        self,
        roster: Roster,
        suspension: Suspension,
        pool: PagePool,
        prefixes: Prefixes,
        policy: Policy,
        swaps: Swaps,
        pace: Pace,
        slots: SlotTable,
        window: Window,
    ) -> None:
        """Admit requests of `roster` as pages of `pool` and LoRA slots of `slots` permit."""
        self._roster = roster
        self._suspension = suspension
        self._window = window
        self._pool = pool
        self._prefixes = prefixes
        self._policy = policy
        self._swaps = swaps
        self._pace = pace
        self._max_rows = len(roster.free_rows)
        self._spare = self._max_rows // 64  # free rows that may stay free until a step computes prompts
        self.missed: list[Request] = []
        """Requests skipped in the latest pass over the queue because they cannot meet their deadline."""
        self._has_slots = slots.slots > 0
        self._overtaking = Overtaking(slots, patience=2 * self._max_rows)

    def share_rows(self) -> None:
        """Preempt requests for rows that the policy gives to others, if few rows are free and pages stay cached."""
        roster = self._roster
        if len(roster.free_rows) > self._spare or roster.paused or not self._prefixes.enabled:
            return
        while True:
            displaced = self._policy.displaced(roster.running, len(roster.free_rows) + roster.draining)
            victim = next(filter(self._prefixes.keeps, displaced), None)
            if victim is None:
                return
            self._suspension.preempt(victim)

    def candidates(
        self, plan: StepPlan, now: float, before: Request | None = None, *, alone: bool = False
    ) -> Iterator[tuple[Request, list[int]]]:
        """Yield requests that may start in `plan`, the next to serve first, with the pages that hold their prefix.

        Start each request, or leave it waiting for this step, before asking for the next. Paused requests are preempted
        if their rows or pages are needed. Requests that cannot meet their deadline are put into `missed`.

        Args:
            plan: The plan so far: decodes, and chunks of prompts that have begun.
            now: Seconds, on the clock of `Asked.deadline`.
            before: Yield only requests that overtake this one, whose prompt has begun; None yields any.
            alone: Yield only requests that compute alone, or only others, and stop at the first of the other kind.
        """
        looked_past, step = 0, plan.step
        beside = bool(alone or before or plan.others)
        self.missed.clear()
        if not (self._roster.free_rows or self._roster.paused):
            return
        reserved = 0 if before is None else self._pages_owed()
        if self._has_slots:
            self._overtaking.begin(idle=not self._roster.running)
            self._reopen()
        for request in self._roster.waiting.in_order(now):
            if before is not None and not self._policy.overtakes(request, before, now):
                return
            if looked_past > self._max_rows or not self._row_is_free():
                return
            if not beside and self._is_left_to_others(request):
                return
            if request.asked.deadline is not None and not self._policy.worthwhile(request, now, self._pace):
                self.missed.append(request)
                continue
            pages = None if self._is_held_up(request) else self._prefixes.find(request, step)
            if pages is None:  # or another request is computing its prefix: waiting is cheaper than computing it twice
                looked_past += 1
                continue
            if request.asked.alone is not alone:
                return
            pages = self._find_room(request, pages, step, reserved)
            if pages is None:
                return
            if request.asked.version is not None:
                self._overtaking.starts(request)
            beside = True
            yield request, pages

    def _is_held_up(self, request: Request) -> bool:
        """Return whether `request` waits for the slot of its adapter, or for pages on their way to host memory."""
        if request.asked.version is not None and not self._overtaking.may_start(request):
            return True
        return bool(request.place.host_places) and not self._swaps.is_ready(request)

    def _is_left_to_others(self, request: Request) -> bool:
        """Return whether to keep the last rows free, so that `request` alone does not add a prompt to the step."""
        free = len(self._roster.free_rows)
        return free <= self._spare and bool(self._roster.running) and self._policy.is_ahead(request)

    def _reopen(self) -> None:
        """Preempt paused requests that hold the slot of a closed adapter."""
        closed = self._overtaking.closed
        for request in self._suspension.paused_holders() if closed else ():
            if request.asked.version in closed:
                self._suspension.preempt(request)

    def _pages_owed(self) -> int:
        """Return how many more pages the prompts of running requests will take."""
        return sum(self._pages_to_come(request, len(request.place.pages)) for request in self._roster.running)

    def _pages_to_come(self, request: Request, held: int) -> int:
        """Return how many more pages `request`, which holds `held`, will hold at a time when its tokens are computed.

        A request that computes alone takes all its pages at once, so that no chunk is ever cut.
        """
        ahead = -(-request.known // self._pool.page_size) - request.place.first_page - held
        if request.asked.alone or self._window.size is None:
            return max(0, ahead)
        return max(0, min(ahead, max(1, self._window.fewest_pages(request.known) - held)))

    def _row_is_free(self) -> bool:
        if not self._roster.free_rows and not self._roster.draining:
            self._suspension.preempt_paused()
        return bool(self._roster.free_rows)

    def _find_room(self, request: Request, pages: list[int], step: int, reserved: int) -> list[int] | None:
        """Return the pages to start `request` with, preempting paused requests for room; None if it does not fit."""
        found: list[int] | None = pages
        while found is not None and not self._fits(request, found, reserved):
            if request.before is not None and request.place.found % self._pool.page_size:
                request.place.found -= request.place.found % self._pool.page_size
                found = found[:-1]  # do without a copy of the last page: its tokens are computed again
                continue
            if self._roster.draining or not self._suspension.preempt_paused():
                return None
            found = self._prefixes.find(request, step)  # the paused request may have held these pages
        return found

    def _fits(self, request: Request, pages: Sequence[int], reserved: int) -> bool:
        """Return whether all known tokens of `request` fit, leaving one more page for every running request."""
        size = self._pool.page_size
        needed = self._pages_to_come(request, len(pages))
        if request.place.found % size:
            needed += 1  # the last page is shared and only partly filled: it is copied when it is written
        refs = self._pool.refs
        needed += sum(1 for page in pages if refs[page] == 0)  # available now, but about to be held
        return needed + reserved + len(self._roster.running) <= self._pool.available
