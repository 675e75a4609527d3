"""`DeadlineQueue` finds the live request with the next deadline; never ends a request."""

from __future__ import annotations

from heapq import heapify, heappop, heappush

from headrace.engine.scheduling.request import Request, State

__all__ = ["DeadlineQueue"]

_FEW = 64


class DeadlineQueue:
    """Requests with a deadline, the earliest first."""

    def __init__(self) -> None:
        """Start empty."""
        self._heap: list[tuple[float, int, Request]] = []
        self.any = False
        """Whether there may be a live request in the queue."""
        self._most = _FEW
        """Number of entries at which those of ended requests are removed."""

    def __len__(self) -> int:
        """Return the number of entries, including some of requests that have ended: at most half, and a few more."""
        return len(self._heap)

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

    def overdue(self, now: float) -> Request | None:
        """Return a live request whose deadline has passed at `now`, in seconds; None if there is none."""
        first = self.first
        return None if first is None or first.asked.deadline is None or first.asked.deadline > now else first
