"""`DeadlineQueue`: which live request's deadline is next; never ends a request."""

from __future__ import annotations

from heapq import heappop, heappush

from headrace.engine.scheduling.request import Request, State

__all__ = ["DeadlineQueue"]


class DeadlineQueue:
    """Requests with a deadline, the earliest first."""

    def __init__(self) -> None:
        """Start empty."""
        self._heap: list[tuple[float, int, Request]] = []

    def add(self, request: Request) -> None:
        """Watch the deadline of `request`, if it has one; it leaves by itself when it ends."""
        if request.deadline is not None:
            heappush(self._heap, (request.deadline, request.id, request))

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
