"""The invariants of the scheduler, as one assertion each; reads state that other modules own and never changes it."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from headrace.engine.scheduling.memory.pages import PagePool
from headrace.engine.scheduling.request import Request, State

__all__ = ["check_scheduler"]


def check_scheduler(
    pool: PagePool,
    requests: Collection[Request],
    *,
    waiting: Sequence[Request],
    running: Sequence[Request],
    paused: Sequence[Request],
    free_rows: Sequence[int],
    max_rows: int,
    draining: int,
    promises: Mapping[bytes, Request],
) -> None:
    """Assert that pages, rows, queues, progress and promises agree.

    Raises:
        AssertionError: They disagree, which is a defect of headrace.
    """
    pool.check(request.place.pages for request in requests)
    rows = [*free_rows, *(request.row for request in requests if request.row >= 0)]
    assert sorted(rows) == list(range(max_rows)), "rows are lost or doubly owned"
    for request in requests:
        _check_request(request, pool.page_size)
    _check_queues(requests, waiting, running, paused)
    leaving = [r for r in requests if r.in_flight and (r.leaving or r.state is State.FINISHED)]
    assert len(leaving) == draining, "the count of draining requests is wrong"
    for key, owner in promises.items():
        assert owner.state is State.RUNNING and not owner.leaving, "a promise of a request that is not running"
        assert key in owner.place.keys[owner.place.registered :], "a promise that is already kept"


def _check_queues(
    requests: Collection[Request], waiting: Sequence[Request], running: Sequence[Request], paused: Sequence[Request]
) -> None:
    assert [r.order for r in running] == sorted(r.order for r in running), "the running queue is out of order"
    for queue, state in ((waiting, State.WAITING), (running, State.RUNNING), (paused, State.PAUSED)):
        listed = {request.id for request in queue}
        assert len(listed) == len(queue), f"a request is queued twice as {state}"
        leaving = state is State.RUNNING  # leaving requests are RUNNING but no longer queued for planning
        expected = {r.id for r in requests if r.state is state and not (leaving and r.leaving)}
        assert listed == expected, f"the {state} queue differs from the requests' states"


def _check_request(request: Request, size: int) -> None:
    assert 0 <= request.computed <= request.planned <= request.known, f"progress out of order: {request}"
    assert len(request.tokens) <= request.known <= max(request.limit, len(request.tokens)), "known out of range"
    assert request.planned <= request.room(size), "planned beyond the page table"
    assert request.in_flight >= request.discard >= 0, "more to discard than is in flight"
    assert request.place.registered * size <= request.sure, "a page is offered before it is surely full"
    assert request.place.registered * size <= len(request.tokens), "a page is offered with tokens not committed"
    if request.reach:
        assert request.asked.speculates and request.in_flight and request.reach > 0, "drafts of no step in flight"
        is_done = request.discard or request.state is State.FINISHED  # its drafts are dropped with its steps
        assert request.computed + request.in_flight <= request.sure or is_done, "a step yields less than a token"
    if request.plain_until:
        _check_plain(request, size)
    if request.awaited >= 0:
        assert not request.in_flight and request.known == len(request.tokens) + 1, "awaits a token too many"
    if request.state is State.WAITING:
        assert not request.in_flight, "a waiting request has a step in flight"
        assert request.row < 0, "a waiting request holds a row"
    stored = request.place.first_page + len(request.place.host_places)
    assert request.place.stored <= stored * size, "more is stored than its places hold"
    assert not request.place.host_places or request.row < 0, "a request with a row is swapped out"
    if request.row < 0:
        assert not request.place.pages, "pages without a row"
    if request.state is State.FINISHED:
        assert request.in_flight, "a finished request is kept with nothing in flight"
        assert request.failed != (request.finish_reason is not None), "finished without exactly one end"
    else:
        assert request.finish_reason is None and not request.failed, "an end without being finished"


def _check_plain(request: Request, size: int) -> None:
    odd = request.leaving or request.unsent or request.is_held or not request.is_plain
    assert not odd and request.state in (State.RUNNING, State.PAUSED), "a plain request is out of the ordinary"
    assert request.known == request.planned + 1, "a plain request does not owe one token"
    most = min(request.room(size), request.limit - 2)
    assert request.plain_until <= most, "a request is plain beyond its pages or its limit"
