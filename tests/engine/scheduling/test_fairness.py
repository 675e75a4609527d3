"""Who runs when, who waits and who is preempted: order, budgets, progress in a small pool, and refusal at once."""

from __future__ import annotations

import pytest
from simulation.rig import Rig, capacity

from headrace.engine.errors import PromptTooLong
from headrace.engine.scheduling.request import Request, State


def words(name: int, length: int) -> list[int]:
    """A prompt that shares nothing with another name's."""
    return [(name * 31 + position * 7) % 97 for position in range(length)]


def ends_in_order(rig: Rig) -> list[Request]:
    """Run to the end; the requests in the order in which they ended."""
    order: list[Request] = []
    while rig.turn():
        order += [request for request in rig.requests if request.id in rig.ends and request not in order]
    rig.check_empty()
    return order


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_first_come_first_served_within_a_priority(depth: int) -> None:
    rig = Rig(capacity(rows=1), depth=depth)
    priorities = [1, 0, 2, 1, 0, -1]
    requests = [rig.submit(words(name, 6), 3, priority=priority)[0] for name, priority in enumerate(priorities)]
    assert ends_in_order(rig) == [requests[name] for name in (5, 1, 4, 0, 3, 2)]


def test_a_small_request_does_not_overtake_a_large_one_that_waits_for_pages() -> None:
    rig = Rig(capacity(pages=10, size=4, rows=4), depth=1)
    (holder,) = rig.submit(words(0, 24), 8)
    rig.turn()
    (large,) = rig.submit(words(1, 30), 1)
    (small,) = rig.submit(words(2, 2), 1)
    while large.state is State.WAITING:
        assert small.state is State.WAITING
        rig.turn()
    assert holder.state is State.FINISHED
    rig.run()
    rig.check_empty()
    assert rig.scheduler.roster.preemptions == 0


def test_one_whose_prefix_is_being_computed_does_not_block_the_one_behind_it() -> None:
    rig = Rig(capacity(pages=64, size=4, rows=4, budget=12), depth=1)
    shared = words(0, 40)
    rig.submit(shared, 1)
    (waits,) = rig.submit([*shared, 1, 2], 1)
    (other,) = rig.submit(words(1, 9), 1)
    for _ in range(4):
        rig.turn()
    assert waits.row < 0 or waits.cached == 40
    rig.run()
    rig.check_empty()
    assert waits.cached == 40 and rig.computed_tokens == 40 + 2 + 9
    assert other.cached == 0


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_a_long_prefill_is_cut_into_chunks_between_which_decodes_go_on(depth: int) -> None:
    rig = Rig(capacity(pages=100, size=4, rows=4, budget=10), depth=depth)
    decoders = [rig.submit(words(name, 3), 60)[0] for name in range(3)]
    for _ in range(depth + 1):
        rig.turn()
    assert all(request.planned >= 3 for request in decoders)
    (long,) = rig.submit(words(9, 100), 2)
    chunks = 0
    while long.planned < 100:
        plan = rig.launch()
        if plan is not None:
            works = {work.request.id: work.num_tokens for work in plan.works}
            assert [works[request.id] for request in decoders] == [1, 1, 1]
            assert works[long.id] == min(7, 100 - (long.planned - works[long.id]))
            assert plan.works[-1].request is long
            chunks += 1
        if plan is None or len(rig.flights) >= depth:
            rig.complete()
    assert chunks == 15
    rig.run()
    rig.check_empty()


def test_prompts_get_what_the_target_of_decodes_leaves() -> None:
    rig = Rig(capacity(pages=200, size=4, rows=4, budget=100), depth=1, itl_target=0.05)
    (long,) = rig.submit(words(0, 90), 30)
    plan = rig.launch()
    assert plan is not None and plan.tokens == 90, "nothing decodes"
    rig.complete()
    rig.scheduler.pace.observe(0, 0.02)
    rig.scheduler.pace.observe(50, 0.07)  # 1 ms a token
    rig.submit(words(1, 95), 1)
    sizes = []
    for _ in range(4):
        plan = rig.launch()
        assert plan is not None and any(work.request is long for work in plan.works)
        sizes.append(plan.tokens - 1)
        rig.complete()
    assert sizes == [30, 30, 30, 5]
    rig.scheduler.pace.observe(0, 10.0)  # decodes alone are too slow
    rig.submit(words(2, 9), 1)
    plan = rig.launch()
    assert plan is not None and plan.tokens == 1 + 4
    rig.complete()
    rig.run()
    rig.check_empty()


def test_rows_bound_the_number_that_runs() -> None:
    rig = Rig(capacity(rows=3, pages=200))
    for name in range(10):
        rig.submit(words(name, 5), 4)
    most = 0
    while rig.turn():
        most = max(most, rig.scheduler.roster.num_running)
    rig.check_empty()
    assert most == 3


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("prefix_cache", [True, False])
def test_two_that_need_most_of_the_pool_each_both_finish(depth: int, prefix_cache: bool) -> None:
    rig = Rig(capacity(pages=10, size=4, rows=4), depth=depth, prefix_cache=prefix_cache)
    requests = [rig.submit(words(name, 8), 17)[0] for name in range(2)]
    rig.run(turns=80)
    rig.check_empty()
    assert [rig.ends[request.id] for request in requests] == ["length", "length"]
    assert requests[0].preemptions == 0 and requests[1].preemptions == 1


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("prefix_cache", [True, False])
def test_many_requests_in_a_tiny_pool_do_not_thrash(depth: int, prefix_cache: bool) -> None:
    rig = Rig(capacity(pages=12, size=4, rows=8), depth=depth, prefix_cache=prefix_cache)
    requests = [rig.submit(words(name, 4 + name % 9), 4 + name % 17)[0] for name in range(60)]
    rig.run(turns=2000)
    rig.check_empty()
    assert set(rig.ends.values()) == {"length"}
    needed = sum(len(request.tokens) - 1 for request in requests)
    assert rig.scheduler.roster.preemptions <= 18, "more than one in four was preempted"
    assert max(request.preemptions for request in requests) <= 2
    assert rig.computed_tokens <= 1.2 * needed


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_a_request_is_admitted_only_where_those_that_run_can_grow(depth: int) -> None:
    rig = Rig(capacity(pages=15, size=4, rows=5), depth=depth)
    for name in range(5):
        rig.submit(words(name, 12), 5)  # three pages each now, four at the end
    rig.run()
    rig.check_empty()
    assert rig.scheduler.roster.preemptions == 0


def test_a_shortage_preempts_no_more_when_steps_are_launched_ahead() -> None:
    counts = []
    for depth in (1, 2, 3):
        rig = Rig(capacity(pages=20, size=4, rows=5), depth=depth)
        for name in range(5):
            rig.submit(words(name, 12), 30)
        rig.run()
        rig.check_empty()
        counts.append(rig.scheduler.roster.preemptions)
    assert counts[0] == counts[1] == counts[2] == 5


def test_preemption_does_not_count_as_a_hit_of_the_prefix_cache() -> None:
    rig = Rig(capacity(pages=10, size=4, rows=4))
    requests = [rig.submit(words(name, 8), 17)[0] for name in range(2)]
    rig.run()
    rig.check_empty()
    assert rig.scheduler.roster.preemptions == 1
    assert [request.cached for request in requests] == [0, 0]
    assert (rig.scheduler.prompt_tokens, rig.scheduler.cached_tokens) == (16, 0)


def test_the_victim_is_the_youngest_of_the_lowest_priority() -> None:
    rig = Rig(capacity(pages=12, size=4, rows=4), depth=1)
    low = rig.submit(words(0, 7), 14, priority=1)[0]
    high = [rig.submit(words(name, 7), 14)[0] for name in (1, 2)]
    rig.run()
    rig.check_empty()
    assert low.preemptions >= 1
    assert high[0].preemptions == 0


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_a_paused_request_gives_way_before_a_younger_one_that_runs(depth: int) -> None:
    rig = Rig(capacity(pages=12, size=4, rows=4), depth=depth)
    (paused,) = rig.submit(words(0, 15), 12)
    others = [rig.submit(words(name, 7), 12)[0] for name in (1, 2)]
    for _ in range(2):
        rig.turn()
    rig.pause(paused)
    rig.run()
    assert [rig.ends.get(request.id) for request in (paused, *others)] == [None, "length", "length"]
    assert paused.preemptions == 1 and all(request.preemptions == 0 for request in others)
    rig.resume(paused)
    rig.run()
    rig.check_empty()
    assert rig.ends[paused.id] == "length"


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_a_paused_request_keeps_its_pages_and_row_while_nobody_needs_them(depth: int) -> None:
    rig = Rig(capacity(), depth=depth)
    (request,) = rig.submit(words(0, 10), 20)
    rig.turn()
    rig.turn()
    rig.pause(request)
    rig.pause(request)
    rig.run()
    assert request.state is State.PAUSED and request.row >= 0
    held, computed = rig.scheduler.pool.held, rig.computed_tokens
    assert held == len(request.place.pages) and request.computed == request.planned
    rig.run()
    assert rig.computed_tokens == computed
    rig.resume(request)
    rig.resume(request)
    rig.run()
    rig.check_empty()
    assert rig.computed_tokens == 29 and request.preemptions == 0


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_a_paused_request_gives_up_its_row_to_one_that_waits(depth: int) -> None:
    rig = Rig(capacity(rows=1), depth=depth)
    (paused,) = rig.submit(words(0, 10), 20)
    rig.turn()
    rig.pause(paused)
    (other,) = rig.submit(words(1, 10), 2)
    rig.run()
    assert rig.ends == {other.id: "length"} and paused.row < 0
    rig.resume(paused)
    rig.run()
    rig.check_empty()


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_the_pages_of_one_that_is_cancelled_are_back_within_as_many_steps_as_are_in_flight(depth: int) -> None:
    rig = Rig(capacity(), depth=depth)
    (cancelled,) = rig.submit(words(0, 10), 50)
    (other,) = rig.submit(words(1, 3), 50)
    for _ in range(5):
        rig.turn()
    while rig.launch() is not None:
        pass
    rig.finish(cancelled)
    assert cancelled.place.pages and cancelled.in_flight == depth
    for _ in range(depth):
        assert cancelled.place.pages
        rig.complete()
    assert not cancelled.place.pages and cancelled.id not in rig.scheduler.roster.requests
    assert rig.scheduler.pool.held == len(other.place.pages)
    rig.run()
    rig.check_empty()


@pytest.mark.parametrize(
    ("pages", "context", "limit", "what"), [(4, 1000, 16, "page pool of 17"), (1000, 30, 29, "context of 30")]
)
def test_a_prompt_that_can_never_fit_is_refused_at_once_and_the_longest_that_fits_runs(
    pages: int, context: int, limit: int, what: str
) -> None:
    rig = Rig(capacity(pages=pages, size=4, context=context, rows=4, budget=16))
    with pytest.raises(PromptTooLong, match=what) as refused:
        rig.submit(words(0, limit + 1), 5)
    error = refused.value
    assert (error.field, error.value, error.limit) == ("prompt", limit + 1, limit)
    (longest,) = rig.submit(words(1, limit), 5)
    (other,) = rig.submit(words(2, 3), 10_000)
    rig.run()
    rig.check_empty()
    assert len(rig.output(longest)) == 1 and rig.ends[longest.id] == "length"
    assert len(other.tokens) == limit + 1, "a completion runs up to the same limit"


def test_choices_that_fill_the_pool_take_turns() -> None:
    rig = Rig(capacity(pages=6, size=4, rows=8), depth=2)
    choices = rig.submit(words(0, 22), 3, n=5)
    rig.run(turns=100)
    rig.check_empty()
    assert {rig.ends[choice.id] for choice in choices} == {"length"}
