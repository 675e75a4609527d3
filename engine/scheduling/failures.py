"""`Failures` decides what a failed step means for its requests, and limits step sizes after a step ran out of memory.

Running out of memory is not the fault of the requests: they start over in steps of half the size, then half of that,
and only a step of the least size fails its request. It never plans a step.
"""

from __future__ import annotations

from headrace.adapters.slots import AdapterVersion
from headrace.engine.errors import OutOfMemory, RequestFailed
from headrace.engine.scheduling.memory.pages import PagePool
from headrace.engine.scheduling.memory.swaps import Swaps
from headrace.engine.scheduling.plan import Capacity, Emission, StepPlan
from headrace.engine.scheduling.request import Request, State
from headrace.engine.scheduling.roster import Roster
from headrace.engine.scheduling.suspension import Suspension

__all__ = ["Failures"]

_STEPS = 64  # steps that must succeed before the size limit doubles


class Failures:
    """Handling of failed steps for one scheduler."""

    def __init__(
        self, capacity: Capacity, roster: Roster, suspension: Suspension, pool: PagePool, swaps: Swaps
    ) -> None:
        """Start with the limits of `capacity`."""
        self._capacity = capacity
        self._roster = roster
        self._suspension = suspension
        self._pool = pool
        self._swaps = swaps
        self._good = 0
        self.retries = 0
        """Steps that ran out of memory and whose requests were tried again."""
        self.is_cautious = False
        """Whether steps are limited to less than `capacity` because one ran out of memory lately."""
        self.most_rows = capacity.max_rows
        """Largest number of requests in a step."""
        self.most_tokens = capacity.max_batched_tokens
        """Largest number of tokens in a step."""

    def fail_step(self, plan: StepPlan, error: RequestFailed) -> list[Emission]:
        """Take in a step that raised: its requests fail with `error`, and requests that share its pages start over.

        If the step ran out of memory, its requests start over in smaller steps instead, unless it had the least size.

        Returns:
            The failures.
        """
        again = isinstance(error, OutOfMemory) and self._can_shrink(plan)
        size = self._capacity.page_size
        emissions = []
        tainted = {page for _, page in [*plan.fetches, *plan.copies]}
        self._swaps.fail(plan, self._roster.requests.values())
        failed: set[Request] = set()
        for work in plan.works:
            request = work.request
            start = min(work.start, request.computed) if request.asked.speculates else work.start
            tainted.update(request.place.pages[max(0, start // size - request.place.first_page) :])
            request.in_flight -= 1
            request.discard = max(request.discard - 1, 0)
            failed.update((request, request.leader or request))
            if request.state is not State.FINISHED and not again:
                emissions.append(self._roster.fail(request, error))
            elif not request.in_flight and (request.leaving or request.state is State.FINISHED):
                request.place.is_tainted = True
                if request.state is State.FINISHED:
                    self._roster.release_drained(request)
                else:
                    self._suspension.requeue_drained(request)
        self.taint(tainted, failed)
        return emissions

    def taint(self, pages: set[int], failed: set[Request]) -> None:
        """Preempt requests that hold one of `pages`, which a failed step wrote, or that forked one of its requests.

        Both sets grow by the pages and requests that were computed from them. All of these requests start over.
        """
        for request in list(self._roster.requests.values()):
            first = next((index for index, page in enumerate(request.place.pages) if page in pages), None)
            if first is None and (request.leader not in failed or not request.place.pages):
                continue
            pages.update(request.place.pages[first or 0 :])
            failed.add(request)  # a request that forked it may hold a copy of such a page
            request.place.is_tainted = True
            if request.state is not State.FINISHED:
                request.discard = request.in_flight
                if not request.leaving:
                    self._suspension.preempt(request)
        for page in pages:
            self._pool.forget(page)

    def fail_adapter(self, version: AdapterVersion, error: RequestFailed) -> list[Emission]:
        """Fail waiting requests whose adapter `version` could not be copied to the device with `error`."""
        waiting = [request for request in self._roster.requests.values() if request.asked.version is version]
        return [self._roster.fail(request, error) for request in waiting if request.state is State.WAITING]

    def limit(self, running: list[Request]) -> tuple[list[Request], bool]:
        """Return those of `running` that one step may hold, and whether these are all that can go on.

        If they are not, no request may start. Called only while `is_cautious`.
        """
        able = [request for request in running if _can_go_on(request)]
        return able[: self.most_rows], len(able) <= self.most_rows

    def went_well(self) -> None:
        """Count a step that succeeded while `is_cautious`."""
        self._good += 1
        if self._good == _STEPS:
            self._allow(2 * self.most_rows, 2 * self.most_tokens)

    def _can_shrink(self, plan: StepPlan) -> bool:
        """Limit the next steps to half of `plan`; False if it had the least size and was not the first to fail."""
        if not plan.size:
            return True
        is_least = plan.size == 1 and (plan.alone or plan.tokens <= self._capacity.page_size)
        if is_least and self.is_cautious:
            self._allow(self._capacity.max_rows, self._capacity.max_batched_tokens)  # the request itself needs too much
            return False
        self._allow(min(self.most_rows, plan.size // 2), min(self.most_tokens, plan.tokens // 2))
        self.is_cautious = True
        self.retries += 1
        return True

    def _allow(self, rows: int, tokens: int) -> None:
        """Limit steps to `rows` requests and `tokens` tokens, at most the capacity."""
        most_rows, most_tokens = self._capacity.max_rows, self._capacity.max_batched_tokens
        self.most_rows = max(1, min(rows, most_rows))
        self.most_tokens = max(1, min(tokens, most_tokens))
        self.is_cautious = self.most_rows < most_rows or self.most_tokens < most_tokens
        self._good = 0


def _can_go_on(request: Request) -> bool:
    """Return whether a step could compute some of the request's tokens now, if pages are available."""
    owed = request.known - request.planned
    decodes = request.is_decodable and (request.known < request.limit or request.asked.pooling is not None)
    return request.is_plannable and (owed > 1 or (owed == 1 and decodes))
