"""`Waiting`: the requests that wait, in the order that a policy gives them; never admits one."""

from __future__ import annotations

from bisect import insort
from collections import deque
from collections.abc import Hashable, Iterator
from heapq import heapify, heappop, heappush

from headrace.engine.scheduling.policy import Policy
from headrace.engine.scheduling.request import Request

__all__ = ["Waiting"]


class Waiting:
    """A queue of one or more lanes, each in a fixed order."""

    def __init__(self, policy: Policy) -> None:
        """Start empty, in the order of `policy`."""
        self._policy = policy
        self._lanes: dict[Hashable, list[Request]] = {}
        self._count = 0

    def __len__(self) -> int:
        """Requests in all lanes."""
        return self._count

    def add(self, request: Request) -> None:
        """Queue `request`."""
        insort(self._lanes.setdefault(self._policy.lane(request), []), request, key=self._policy.place)
        self._count += 1

    def remove(self, request: Request) -> None:
        """Take `request` out, wherever it stands.

        Raises:
            ValueError: It does not wait.
        """
        key = self._policy.lane(request)
        lane = self._lanes.get(key, [])
        lane.remove(request)
        self._count -= 1
        if not lane:
            del self._lanes[key]

    def in_order(self, now: float) -> Iterator[Request]:
        """All that wait at `now` (in seconds), first come those to serve first; each may be removed once it is seen.

        What being served does to the urgency of its lane counts for the next.
        """
        if len(self._lanes) == 1:
            yield from list(self)
            return
        urgency = self._policy.urgency
        heads = [(urgency(lane[0], now), number, deque(lane)) for number, lane in enumerate(self._lanes.values())]
        heapify(heads)
        while heads:
            key, number, lane = heappop(heads)
            if heads and (changed := urgency(lane[0], now)) != key:  # by what was served since
                heappush(heads, (changed, number, lane))
                continue
            yield lane.popleft()
            if lane:
                heappush(heads, (urgency(lane[0], now), number, lane))

    def check(self) -> None:
        """Assert that every lane is in order and that the count is right.

        Raises:
            AssertionError: A defect of headrace, or a policy whose keys change.
        """
        assert self._count == sum(map(len, self._lanes.values())), "the count of waiting requests is wrong"
        for key, lane in self._lanes.items():
            assert lane, "an empty lane is kept"
            assert all(self._policy.lane(request) == key for request in lane), "a request waits in the wrong lane"
            places = [self._policy.place(request) for request in lane]
            assert places == sorted(places), "a lane is out of order"

    def __iter__(self) -> Iterator[Request]:
        """All that wait, in no order."""
        return (request for lane in self._lanes.values() for request in lane)
