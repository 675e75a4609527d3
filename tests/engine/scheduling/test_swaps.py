"""Swapping: what is kept of a request that gives way, that it comes back as it was, and what a failed step costs."""

from __future__ import annotations

import pytest
from simulation.rig import Rig, capacity

from headrace.engine.scheduling.load import num_swapped
from headrace.engine.scheduling.request import Request, State


def words(name: int, length: int) -> list[int]:
    """A prompt that shares nothing with another name's."""
    return [name, *((name * 31 + position * 7) % 97 for position in range(length - 1))]


def swapping(
    *, pages: int = 10, places: int = 20, depth: int = 1, prefix_cache: bool = False, page_seconds: float = 0.001
) -> Rig:
    """A rig in which computing a token takes 10 ms, so that swapping a page of four is worth up to 20 ms."""
    rig = Rig(capacity(pages=pages, rows=4), depth=depth, prefix_cache=prefix_cache, places=places)
    rig.scheduler.swaps.host.page_seconds = page_seconds
    rig.scheduler.pace.observe(0, 0.01)
    rig.scheduler.pace.observe(100, 1.01)
    return rig


def first_to_give_way(rig: Rig) -> Request:
    """Two that need most of the pool each, run until the second has been swapped out."""
    _, second = (rig.submit(words(name, 8), 17)[0] for name in range(2))
    while not second.place.host_places:
        rig.turn()
    return second


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_one_that_gives_way_computes_nothing_twice(depth: int) -> None:
    rig = swapping(depth=depth)
    second = first_to_give_way(rig)
    assert second.state is State.WAITING and second.place.stored == len(second.tokens) - 1
    assert (num_swapped(rig.scheduler.roster), rig.scheduler.roster.num_waiting) == (1, 1)
    rig.run()
    rig.check_empty()
    wasted = rig.computed_tokens - sum(len(request.tokens) - 1 for request in rig.requests)
    assert 0 <= wasted < 2 * depth  # steps launched ahead of an end
    assert (rig.scheduler.roster.preemptions, rig.scheduler.swaps.count) == (1, 1)
    assert rig.scheduler.swaps.host.used == 0


@pytest.mark.parametrize(("page_seconds", "places"), [(0.03, 20), (0.001, 2), (0.001, 0)])
def test_pages_are_computed_again_where_moving_takes_longer_or_there_is_no_room(
    page_seconds: float, places: int
) -> None:
    rig = swapping(page_seconds=page_seconds, places=places)
    for name in range(2):
        rig.submit(words(name, 8), 17)
    rig.run()
    rig.check_empty()
    assert rig.scheduler.roster.preemptions == 1 and rig.scheduler.swaps.count == 0
    assert rig.computed_tokens > sum(len(request.tokens) for request in rig.requests) + 8


def test_a_paused_request_is_swapped_out_and_resumes_token_for_token() -> None:
    rig = swapping()
    (paused,) = rig.submit(words(0, 10), 20)
    for _ in range(8):
        rig.turn()
    rig.pause(paused)
    (other,) = rig.submit(words(1, 30), 4)
    while other.state is not State.FINISHED:
        rig.turn()
    assert paused.state is State.PAUSED and paused.place.host_places and paused.row < 0
    rig.resume(paused)
    rig.run()
    rig.check_empty()
    assert rig.scheduler.swaps.count == 1 and rig.ends[paused.id] == "length"


@pytest.mark.parametrize("end", ["waiting", "paused"])
def test_one_that_ends_while_it_is_swapped_out_gives_its_places_back(end: str) -> None:
    rig = swapping()
    second = first_to_give_way(rig)
    if end == "paused":
        rig.pause(second)
    rig.finish(second)
    assert rig.scheduler.swaps.host.used == 0
    rig.run()
    rig.check_empty()


@pytest.mark.parametrize("fault", ["step", "launch"])
@pytest.mark.parametrize("moves", ["spills", "fetches"])
@pytest.mark.parametrize("depth", [1, 2])
def test_a_failed_step_that_moves_pages_costs_its_own_requests_and_no_wrong_token(
    fault: str, moves: str, depth: int
) -> None:
    def play(failing: int) -> tuple[Rig, int]:
        """The number of the first step with such moves."""
        rig, first = swapping(depth=depth), -1
        for name in range(2):
            rig.submit(words(name, 8), 17)
        while rig.scheduler.roster.requests:
            plan = rig.launch(fault if rig.scheduler.roster.step == failing else "")
            if plan is not None and getattr(plan, moves) and first < 0:
                first = plan.step
            if plan is None or len(rig.flights) == depth:
                rig.complete()
        rig.check_empty()
        return rig, first

    _, moving = play(-1)
    rig, found = play(moving)
    assert found == moving >= 0 and "RequestFailed" in rig.ends.values()
    assert rig.scheduler.swaps.host.used == 0


def test_evicted_prefixes_come_back_from_the_host() -> None:
    rig = swapping(pages=12, places=30, prefix_cache=True)
    shared = words(0, 24)
    rig.submit(shared, 1)
    rig.run()
    for name in range(1, 4):  # each takes nearly all pages
        rig.submit(words(name, 40), 1)
        rig.run()
    assert not rig.scheduler.pool.match(rig.requests[0].place.keys)
    before = rig.computed_tokens
    (again,) = rig.submit([*shared, 5, 6], 1)
    rig.run()
    rig.check_empty()
    assert again.cached == 24 and rig.computed_tokens - before == 2
    assert rig.scheduler.cached_tokens == 24


def test_pages_from_the_host_leave_one_to_write_where_others_hold_those_that_slide() -> None:
    """The first page slides out of the window of the prefix, but is not free before another request lets it go."""
    rig = Rig(capacity(pages=6, size=2, rows=4, window=8), depth=2, places=20)
    shared = words(0, 11)
    for prompt in (shared, words(1, 11)):  # the second takes the pages of the first, which go to the host
        rig.submit(prompt, 1)
        rig.run()
    (ends,) = rig.submit([*shared[:4], 96], 9)
    rig.launch()
    rig.finish(ends)
    (request,) = rig.submit([*shared, *words(2, 14)], 3)
    plan = rig.launch()
    assert plan is not None and [row.row for row in plan.new_rows] == [request.row]
    assert rig.scheduler.swaps.host.used and request.cached == 8, "two pages of the other, two of the host's three"
    assert [(work.start, work.num_tokens) for work in plan.works] == [(8, 2)]
    rig.run()
    rig.check_empty()
