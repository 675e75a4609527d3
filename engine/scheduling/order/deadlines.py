"""`DeadlineQueue`: which live request's deadline is next; never ends a request."""

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
        self._most = _FEW
        """Entries at which those of requests that have ended are looked for."""

    def __len__(self) -> int:
        """Entries, of which at most half and a few are of requests that have ended."""
        return len(self._heap)

    def add(self, request: Request) -> None:
        """Watch the deadline of `request`, if it has one; it leaves by itself, some time after it has ended."""
        if request.deadline is None:
            return
        heappush(self._heap, (request.deadline, request.id, request))
        if len(self._heap) > self._most:
            self._heap = [entry for entry in self._heap if entry[2].state is not State.FINISHED]
            heapify(self._heap)
            self._most = _FEW + 2 * len(self._heap)

    @property
    def first(self) -> Request | None:
        """The live request that must end next."""
        heap = self._heap
        while heap and heap[0][2].state is State.FINISHED:
            heappop(heap)
        return heap[0][2] if heap else None

    def overdue(self, now: float) -> Request | None:
        """A live request whose deadline has passed at `now`, in seconds."""
        first = self.first
        return None if first is None or first.deadline is None or first.deadline > now else first
