"""`DeadlineQueue` ends requests whose deadline has passed, and refuses those that would miss theirs.

Next to read: scheduler.py, which asks it before each plan.
"""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heapify, heappop, heappush

from headrace.engine.errors import Overloaded
from headrace.engine.scheduling.order.pace import Pace
from headrace.engine.scheduling.plan import Emission
from headrace.engine.scheduling.policy import Policy
from headrace.engine.scheduling.request import Request, State
from headrace.engine.scheduling.roster import Roster

__all__ = ["DeadlineQueue"]

_FEW = 64


class DeadlineQueue:
    """Requests with a deadline, the earliest first, and the ends of those that missed theirs."""

    def __init__(self, roster: Roster, policy: Policy, pace: Pace) -> None:
        """Start empty; what is expected of a new request follows from `policy` and `pace`."""
        self._heap: list[tuple[float, int, Request]] = []
        self.any = False
        """Whether there may be a live request in the queue."""
        self.lapsed: list[Emission] = []
        """Ends of requests that missed their deadline since the last `pop_lapsed`."""
        self._most = _FEW
        """Number of entries at which those of ended requests are removed."""
        self._roster = roster
        self._policy = policy
        self._pace = pace

    def __len__(self) -> int:
        """Return the number of entries, including some of requests that have ended: at most half, and a few more."""
        return len(self._heap)

    def check(self, request: Request, deadline: float) -> None:
        """Reject a new request if the policy expects it to miss its deadline; accept any while nothing runs or waits.

        Measured step times may have been outliers, which only further steps can correct, so an idle engine accepts it.

        Raises:
            Overloaded: The first token is expected after the deadline.
        """
        waiting = self._roster.waiting
        if request.leader is not None or not (self._roster.running or waiting):  # one decision for all choices
            return
        wait = self._policy.expected_wait(request, waiting.tokens_before(request), self._pace)
        needed = wait + self._pace.prefill(request.known)
        left = deadline - request.arrived
        if needed > left:
            raise Overloaded(
                f"deadline: the first token is expected in {needed:.3f} s, which is not within {left:.3f} s",
                field="deadline",
                value=left,
                limit={"ge": needed},
            )

    def add(self, request: Request, deadline: float) -> None:
        """Watch the deadline of `request`; its entry is removed some time after it has ended."""
        self.any = True
        heappush(self._heap, (deadline, request.id, request))
        if len(self._heap) > self._most:
            self._heap = [entry for entry in self._heap if entry[2].state is not State.FINISHED]
            heapify(self._heap)
            self._most = _FEW + 2 * len(self._heap)

    @property
    def first(self) -> Request | None:
        """Live request with the earliest deadline; None if there is none."""
        heap = self._heap
        while heap and heap[0][2].state is State.FINISHED:
            heappop(heap)
        self.any = bool(heap)
        return heap[0][2] if heap else None

    @property
    def next(self) -> float | None:
        """Time in seconds at which the next request must end; None if no request has a deadline."""
        first = self.first if self.any else None
        return None if first is None else first.asked.deadline

    def overdue(self, now: float) -> Request | None:
        """Return a live request whose deadline has passed at `now`, in seconds; None if there is none."""
        first = self.first
        return None if first is None or first.asked.deadline is None or first.asked.deadline > now else first

    def end_overdue(self, now: float) -> None:
        """End the requests whose deadline has passed at `now`, in seconds."""
        while (request := self.overdue(now)) is not None:
            self._lapse(request)

    def end_missed(self, missed: Sequence[Request]) -> None:
        """End waiting requests that can no longer meet their deadline."""
        for request in missed:
            self._lapse(request)
        if not (self._roster.running or self._roster.waiting):
            self._pace.forget()  # no other step would show that the device is faster by now

    def pop_lapsed(self) -> list[Emission]:
        """Return, once, the ends of requests whose deadline passed or could no longer be met in the latest plan."""
        lapsed = self.lapsed
        self.lapsed = []
        return lapsed

    def _lapse(self, request: Request) -> None:
        if request.state is not State.FINISHED:
            self._roster.finish(request, "deadline")
            self.lapsed.append(Emission(request, None, "deadline"))
