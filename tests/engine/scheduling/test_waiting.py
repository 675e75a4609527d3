"""The queue of waiting requests: lanes, their fixed order, and the order among them as a policy wants it each time."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.engine.scheduling.asked import Asked
from headrace.engine.scheduling.order.waiting import Waiting
from headrace.engine.scheduling.policies import Deadlines
from headrace.engine.scheduling.policy import FirstCome
from headrace.engine.scheduling.request import Request


class Served(FirstCome):
    """One lane for each priority; the one served least is next."""

    def __init__(self) -> None:
        self.served: dict[int, int] = {}

    def lane(self, request: Request) -> int:
        return request.asked.priority

    def urgency(self, request: Request, now: float) -> Any:
        return self.served.get(request.asked.priority, 0), request.asked.priority


def a_request(name: int, priority: int) -> Request:
    return Request(Asked(limit=2, priority=priority), [1], id=name)


@given(st.lists(st.tuples(st.integers(0, 3), st.booleans()), max_size=30))
def test_lanes_are_served_in_turn_and_each_in_its_own_order(entries: list[tuple[int, bool]]) -> None:
    policy = Served()
    waiting = Waiting(policy)
    requests = [a_request(name, priority) for name, (priority, _) in enumerate(entries)]
    for request in requests:
        waiting.add(request)
        waiting.check()
    gone = [request for request, (_, leaves) in zip(requests, entries, strict=True) if leaves]
    for request in gone:
        waiting.remove(request)
        waiting.check()
    left = [request for request in requests if request not in gone]
    seen: list[Request] = []
    for request in waiting.in_order(0.0):
        unseen = [other for other in left if other not in seen]
        least = min(unseen, key=lambda other: (*policy.urgency(other, 0.0), other.id))
        assert request is least
        waiting.remove(request)  # as if it were admitted, while the queue is being looked through
        policy.served[request.asked.priority] = policy.served.get(request.asked.priority, 0) + 1
        seen.append(request)
    assert sorted(request.id for request in seen) == [request.id for request in left]
    assert len(waiting) == 0 and list(waiting) == []


def test_requests_that_are_passed_over_keep_their_places() -> None:
    waiting = Waiting(FirstCome())
    requests = [a_request(name, priority) for name, priority in enumerate([1, 0, 1])]
    for request in requests:
        waiting.add(request)
    for request in waiting.in_order(0.0):
        if request is requests[0]:
            waiting.remove(request)
    assert list(waiting.in_order(0.0)) == [requests[1], requests[2]]


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(1, 99), st.booleans()), max_size=80))
def test_tokens_before_a_request_are_those_of_its_lane_with_lower_places(
    entries: list[tuple[int, int, bool]],
) -> None:
    policy = Deadlines()
    waiting = Waiting(policy)
    queued: list[Request] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("headrace.engine.scheduling.order.sums._CHUNK", 2)
        for name, (deadline, length, leaves) in enumerate(entries):
            adapter = ["x", None][name % 3 == 0]
            asked = Asked(limit=100, tenant="ab"[name % 2], adapter=adapter, deadline=deadline or None)
            request = Request(asked, [1] * length, id=name)
            mine = [other for other in queued if other.asked.tenant == request.asked.tenant]
            before = [other for other in mine if policy.place(other) < policy.place(request)]
            assert waiting.tokens_before(request) == sum(other.known for other in before)
            waiting.add(request)
            queued.append(request)
            if leaves:
                waiting.remove(queued.pop(length % len(queued)))
            waiting.check()


def test_tokens_are_counted_of_all_that_waited_before_anybody_asked() -> None:
    policy = Deadlines()
    waiting = Waiting(policy)
    requests = [
        Request(Asked(limit=100, deadline=float(name)), [1] * (1 + name % 7), id=name) for name in range(1, 700)
    ]
    for request in requests:
        waiting.add(request)
    waiting.remove(requests[3])
    late = Request(Asked(limit=100, deadline=690.5), [1], id=700)
    first = sum(request.known for request in requests[:690]) - requests[3].known
    assert waiting.tokens_before(late) == first
    waiting.remove(requests[5])
    assert waiting.tokens_before(late) == first - requests[5].known
    waiting.check()
