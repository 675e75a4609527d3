"""`Planner` plans what each request computes in a step: the next token of running requests, and chunks of prompts.

It makes the pages writable that a request is about to write, and preempts others for them; it does not order prompts.
Nearly all decodes need only a place in the plan (`Request.plain_until`): the loop checks as little of each as it can.
Next to read: commit.py, which has the loop that accepts their tokens.
"""

from __future__ import annotations

from collections.abc import Sequence

from headrace.engine.scheduling.memory.pages import PagePool
from headrace.engine.scheduling.memory.prefix import Prefixes
from headrace.engine.scheduling.memory.unsharing import unshare
from headrace.engine.scheduling.memory.window import Window
from headrace.engine.scheduling.plan import GivenTokens, PageEntry, StepPlan, Work
from headrace.engine.scheduling.request import Request
from headrace.engine.scheduling.roster import Roster
from headrace.engine.scheduling.speculation.planning import plan_drafts
from headrace.engine.scheduling.suspension import Suspension

__all__ = ["Planner"]


class Planner:
    """Planning of single requests: takes free pages, and preempts requests last in order if there are none."""

    def __init__(
        self, roster: Roster, suspension: Suspension, pool: PagePool, prefixes: Prefixes, window: Window
    ) -> None:
        """Allocate pages of `pool`, preempting requests of `roster` if there are none.

        Args:
            roster: The requests.
            suspension: Preempts them.
            pool: The pages.
            prefixes: Offers pages to other requests before their holder gives them back.
            window: The attention window, behind which pages are given back.
        """
        self._prefixes = prefixes
        self._window = window
        self._roster = roster
        self._pool = pool
        self._suspension = suspension

    def plan_decodes(self, plan: StepPlan, running: Sequence[Request]) -> list[Request]:
        """Plan one token of each request that owes one token and samples the next, and drafts behind it.

        Args:
            plan: A plan without work items; decodes are added to it. Its depth is how many drafts each may have.
            running: Requests in service order; planning may preempt some of them.

        Returns:
            Requests that owe more than one token or are pooled, whose tokens are prefilled.
        """
        decodes, starts, step, page_size = plan.decodes, plan.starts, plan.step, self._pool.page_size
        prefills = []
        for request in list(running):
            start = request.planned
            if start >= request.plain_until:
                if request.known - start > 1 or (request.asked.pooling is not None and request.known > start):
                    prefills.append(request)
                    continue
                if not (start < request.known < request.limit and request.is_decodable):
                    continue
                if not self._make_ready(plan, request, 1):
                    continue
                if request.is_plain:
                    request.plain_until = min(request.room(page_size), request.limit - 2)
            decodes.append(request)
            starts.append(start)
            request.ready = start - request.reach
            request.planned = start + 1
            request.known = start + 2
            request.latest_step = step
            request.in_flight += 1
        plan.rows += [request.row for request in decodes]
        plan.tokens = len(decodes)
        if plan.depth:
            plan_drafts(plan, self._pool, len(running))
        return prefills

    def plan_tokens(self, plan: StepPlan, request: Request, most: int) -> int:
        """Plan up to `most` of the tokens that `request` owes, as far as pages allow; return how many were planned."""
        start = request.planned
        count = self._make_ready(plan, request, min(request.known - start, most))
        if not count:
            return 0
        samples = start + count == request.known and request.asked.pooling is None
        plan.others.append(Work(request, request.row, start, count, samples))
        plan.tokens += count
        request.ready = start - request.reach
        request.latest_step = plan.step
        request.planned = start + count
        request.in_flight += 1
        if samples:
            request.known += 1
        return count

    def _make_ready(self, plan: StepPlan, request: Request, count: int) -> int:
        """Prepare `request` for its next `count` tokens: allocate pages, and send tokens that the host chose.

        Returns:
            Number of these tokens that may be planned.
        """
        if request.planned + count > request.room(self._pool.page_size) or request.forked:
            count = self.grow(plan, request, count)
        if count and (request.unsent or request.is_held):
            start = len(request.tokens) - request.unsent
            plan.given.append(GivenTokens(request.row, start, request.tokens[start:]))
            request.unsent = 0
            request.is_held = False
        return count

    def grow(self, plan: StepPlan, request: Request, count: int) -> int:
        """Make pages writable for `count` tokens from `request.planned`; return how many of them have room."""
        if self._window.size is not None:
            self._slide(request)
        if request.forked and not unshare(plan, request, self._pool, self._obtain):
            return 0
        size, pages = self._pool.page_size, request.place.pages
        while request.room(size) < request.planned + count:
            page = self._obtain(request)
            if page is None:
                break
            plan.entries.append(PageEntry(request.row, request.place.first_page + len(pages), page))
            pages.append(page)
        return min(count, request.room(size) - request.planned)

    def _slide(self, request: Request) -> None:
        """Give back the pages that no further step of `request` reads, and none in flight."""
        first = self._window.first_page(request.computed)
        if first > request.place.first_page:
            self._prefixes.offer(request)
            self._pool.release(request.place.slide_to(first))

    def _obtain(self, request: Request) -> int | None:
        """Return a page for `request`, preempting requests after it in order; None if it must wait for one."""
        page = self._pool.allocate()
        while page is None and self._preempt_after(request):
            page = self._pool.allocate()
        return page

    def _preempt_after(self, request: Request) -> bool:
        """Preempt the last request in order, if it is not `request`; return whether its pages were freed at once."""
        if self._roster.draining:  # pages are about to be freed: taking more than needed would thrash
            return False
        victim = self._suspension.last()
        return victim is not request and self._suspension.preempt(victim)
