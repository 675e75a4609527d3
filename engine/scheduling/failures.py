"""`Failures`: what a failed step means for its requests, and how small steps are to be until they succeed again.

A step that found no memory is not its requests' fault: they start over, in steps of half its size and half of that, and
only what finds none alone fails. Never plans a step.
"""

from __future__ import annotations

from headrace.engine.errors import OutOfMemory, RequestFailed
from headrace.engine.scheduling.memory.swaps import Swaps
from headrace.engine.scheduling.plan import Capacity, Emission, StepPlan
from headrace.engine.scheduling.request import Request, State
from headrace.engine.scheduling.roster import Roster

__all__ = ["Failures"]

_STEPS = 64  # that must go well before steps may be twice as large again


class Failures:
    """The failed steps of one scheduler."""

    def __init__(self, capacity: Capacity, roster: Roster, swaps: Swaps) -> None:
        """Allow steps as large as `capacity` does."""
        self._capacity = capacity
        self._roster = roster
        self._swaps = swaps
        self._good = 0
        self.retries = 0
        """Steps that found no memory, and whose requests were tried again."""
        self.is_cautious = False
        """Whether a step found no memory of late: steps may have to be smaller than the device was opened for."""
        self.most_rows = capacity.max_rows
        """Requests in a step."""
        self.most_tokens = capacity.max_batched_tokens
        """Tokens in a step."""

    def take_in(self, plan: StepPlan, error: RequestFailed) -> list[Emission]:
        """A step raised: its requests fail with `error` or start over, sharers of its pages start over."""
        again = isinstance(error, OutOfMemory) and self._can_shrink(plan)
        size = self._capacity.page_size
        emissions = []
        spoilt = {page for _, page in [*plan.fetches, *plan.copies]}
        self._swaps.fail(plan, self._roster.requests.values())
        failed: set[Request] = set()
        for work in plan.works:
            request = work.request
            spoilt.update(request.pages[work.start // size :])
            request.in_flight -= 1
            request.discard = max(request.discard - 1, 0)
            failed.update((request, request.leader or request))
            if request.state is not State.FINISHED and not again:
                emissions.append(self._roster.fail(request, error))
            elif not request.in_flight and (request.leaving or request.state is State.FINISHED):
                request.spoilt = True
                self._roster.let_go(request)
        self._roster.spoil(spoilt, failed)
        return emissions

    def limit(self, running: list[Request]) -> tuple[list[Request], bool]:
        """Return the requests of `running` that one step may hold, and whether these are all: if not, none starts."""
        if not self.is_cautious:
            return running, True
        able = [request for request in running if request.can_go_on]
        return able[: self.most_rows], len(able) <= self.most_rows

    def went_well(self) -> None:
        """A step succeeded while `is_cautious`."""
        self._good += 1
        if self._good == _STEPS:
            self._allow(2 * self.most_rows, 2 * self.most_tokens)

    def _can_shrink(self, plan: StepPlan) -> bool:
        """Make the next steps at most half of `plan`; False if it was as small as can be, and not the first."""
        if not plan.size:
            return True
        is_least = plan.size == 1 and (plan.alone or plan.tokens <= self._capacity.page_size)
        if is_least and self.is_cautious:
            self._allow(self._capacity.max_rows, self._capacity.max_batched_tokens)  # it was this one's fault
            return False
        self._allow(min(self.most_rows, plan.size // 2), min(self.most_tokens, plan.tokens // 2))
        self.is_cautious = True
        self.retries += 1
        return True

    def _allow(self, rows: int, tokens: int) -> None:
        """Steps of so many, as far as the device was opened for them."""
        most_rows, most_tokens = self._capacity.max_rows, self._capacity.max_batched_tokens
        self.most_rows, self.most_tokens = max(1, min(rows, most_rows)), max(1, min(tokens, most_tokens))
        self.is_cautious = self.most_rows < most_rows or self.most_tokens < most_tokens
        self._good = 0
