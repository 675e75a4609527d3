"""`Waiting` holds the waiting requests in the order of a policy; it never admits one."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Hashable, Iterator
from heapq import heapify, heappop, heappush
from typing import Any

from headrace.engine.scheduling.order.sums import Sums
from headrace.engine.scheduling.policy import Policy
from headrace.engine.scheduling.request import Request

__all__ = ["Waiting"]


class _Lane:
    """Waiting requests of one lane, in the order of their keys."""

    def __init__(self) -> None:
        self.requests: list[Request] = []
        self.places: list[Any] = []
        self.sums: Sums | None = None
        """Known tokens of the requests; None until somebody first asks for a sum of them."""

    def add(self, request: Request, place: Any) -> None:
        index = bisect_right(self.places, place)
        self.requests.insert(index, request)
        self.places.insert(index, place)
        if self.sums is not None:
            self.sums.insert(index, request.known)

    def remove(self, request: Request, place: Any) -> None:
        index = self.requests.index(request, bisect_left(self.places, place))
        del self.requests[index], self.places[index]
        if self.sums is not None:
            self.sums.remove(index)

    def tokens_before(self, place: Any) -> int:
        if self.sums is None:
            self.sums = Sums(request.known for request in self.requests)
        return self.sums.first(bisect_right(self.places, place))


class Waiting:
    """A queue of one or more lanes, each in a fixed order."""

    def __init__(self, policy: Policy) -> None:
        """Start empty, in the order of `policy`."""
        self._policy = policy
        self._lanes: dict[Hashable, _Lane] = {}
        self._count = 0

    def __len__(self) -> int:
        """Return the number of requests in all lanes."""
        return self._count

    def add(self, request: Request) -> None:
        """Queue `request`."""
        key = self._policy.lane(request)
        lane = self._lanes.get(key)
        if lane is None:
            lane = self._lanes[key] = _Lane()
        lane.add(request, self._policy.place(request))
        self._count += 1

    def remove(self, request: Request) -> None:
        """Remove `request` from its lane.

        Raises:
            ValueError: The request does not wait.
        """
        key = self._policy.lane(request)
        lane = self._lanes.get(key, _Lane())
        lane.remove(request, self._policy.place(request))
        self._count -= 1
        if not lane.requests:
            del self._lanes[key]

    def tokens_before(self, request: Request) -> int:
        """Return the known tokens of queued requests that come before `request`, not queued yet, in its lane."""
        lane = self._lanes.get(self._policy.lane(request))
        return 0 if lane is None else lane.tokens_before(self._policy.place(request))

    def in_order(self, now: float) -> Iterator[Request]:
        """Yield the requests that wait at `now` (seconds), the most urgent first; each may be removed once yielded.

        Urgency is computed anew after each request, since serving it may change the urgency of its lane.
        """
        if len(self._lanes) == 1:
            yield from list(self)
            return
        urgency = self._policy.urgency
        lanes = [deque(lane.requests) for lane in self._lanes.values()]
        heads = [(urgency(lane[0], now), number, lane) for number, lane in enumerate(lanes)]
        heapify(heads)
        while heads:
            key, number, lane = heappop(heads)
            if heads and (changed := urgency(lane[0], now)) != key:  # changed by serving others
                heappush(heads, (changed, number, lane))
                continue
            yield lane.popleft()
            if lane:
                heappush(heads, (urgency(lane[0], now), number, lane))

    def check(self) -> None:
        """Assert that every lane is in order and that the count is right.

        Raises:
            AssertionError: A lane is out of order, which is a defect of headrace or of a policy whose keys change.
        """
        assert self._count == sum(1 for _ in self), "the count of waiting requests is wrong"
        for key, lane in self._lanes.items():
            assert lane.requests, "an empty lane is kept"
            assert all(self._policy.lane(request) == key for request in lane.requests), "a request is in the wrong lane"
            assert lane.places == list(map(self._policy.place, lane.requests)), "the place of a waiting request changed"
            assert lane.places == sorted(lane.places), "a lane is out of order"
            if lane.sums is not None:
                lane.sums.check([request.known for request in lane.requests])

    def __iter__(self) -> Iterator[Request]:
        """Yield the waiting requests in no particular order."""
        return (request for lane in self._lanes.values() for request in lane.requests)
