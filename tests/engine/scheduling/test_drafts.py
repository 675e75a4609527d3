"""Drafts in the scheduler: bounds, pages, budgets and forks, driven by hand; the simulation does the same at random."""

from __future__ import annotations

import pytest
from simulation.rig import Rig, capacity

from headrace.engine.scheduling.memory.pages import PagePool
from headrace.engine.scheduling.plan import StepPlan
from headrace.engine.scheduling.result import StepResult
from headrace.engine.scheduling.speculation.runs import counts_of, runs_of


def deep(depth: int, *, rate: float = 1.0, most: int = 4, ahead: int = 2, **sizes: int) -> Rig:
    """A rig whose steps have `depth` drafts a row, of which `rate` are right."""
    rig = Rig(capacity(**sizes), depth=ahead, drafts=most, choose=lambda rows, context: depth)
    rig.runner.rate = rate
    return rig


def test_a_step_yields_several_tokens_and_bounds_hold_them_until_they_are_known() -> None:
    rig = deep(3, ahead=3)
    (request,) = rig.submit([1, 2, 3, 4, 5], 40, speculates=True)
    rig.launch()
    assert (request.known, request.planned, request.reach) == (6, 5, 0)
    plan = rig.launch()
    assert plan is not None and plan.drafts == [3] and plan.tokens == 4
    assert (request.known, request.planned, request.reach) == (10, 9, 3)
    rig.launch()
    assert (request.known, request.planned, request.reach, request.sure) == (14, 13, 6, 7)
    rig.complete()
    rig.complete()
    length = len(request.tokens)
    assert 7 <= length <= 10 and request.computed == length - 1
    assert (request.planned, request.reach, request.in_flight) == (length - 1 + 4, 3, 1)
    rig.run()
    rig.check_empty()


def test_right_drafts_take_fewer_steps_and_wrong_ones_no_more() -> None:
    steps = {}
    for name, depth, rate in (("none", 0, 1.0), ("wrong", 3, 0.0), ("right", 3, 1.0)):
        rig = deep(depth, rate=rate)
        rig.submit([1, 2, 3], 60, speculates=True)
        rig.run()
        rig.check_empty()
        steps[name] = rig.scheduler.roster.step
    assert steps["none"] == steps["wrong"] and steps["right"] < 0.7 * steps["none"]


def test_drafts_end_at_the_limit_and_leave_half_of_the_budget() -> None:
    rig = deep(4, ahead=1, budget=12)
    requests = [rig.submit([1, 2, 3 + each], 3, speculates=True)[0] for each in range(2)]
    rig.turn()
    plan = rig.launch()
    assert plan is not None and plan.drafts == [1, 1], "a token each, then one more and the last, which is not computed"
    rig.complete()
    rig.run()
    assert [len(rig.output(request)) for request in requests] == [3, 3]
    rig = deep(4, ahead=1, budget=12)
    for each in range(4):
        rig.submit([1, 2, each], 30, speculates=True)
    rig.turn()
    plan = rig.launch()
    assert plan is not None and plan.drafts == [1, 1, 1, 1], "of 12 tokens 8 are left, and 4 of these for prompts"


def test_a_row_behind_a_prefix_hit_is_sent_all_tokens_that_drafts_may_follow_from() -> None:
    rig = deep(2, size=4)
    prompt = list(range(12))
    rig.submit(prompt, 4, speculates=True)
    rig.run()
    (request,) = rig.submit(prompt, 4, speculates=True)
    plan = rig.launch()
    assert plan is not None and request.cached == 8
    assert (plan.new_rows[0].start, plan.new_rows[0].tokens) == (0, prompt)
    rig.run()
    rig.check_empty()


def test_drafts_leave_a_page_for_everybody() -> None:
    rig = deep(4, ahead=1, pages=6, size=4, rows=2)
    rig.submit([1, 2, 3, 4, 5, 6, 7], 9, speculates=True)
    rig.submit([1, 2, 3, 4, 5, 6, 8], 9, speculates=True)
    rig.run()
    rig.check_empty()
    assert rig.scheduler.roster.preemptions == 0


@pytest.mark.parametrize("looks", ["at all pages", "at the page of the bound alone"])
def test_who_branches_near_the_end_shares_no_page_that_drafts_write(
    looks: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first page that a step may write is that of the fewest tokens, which a fork may hold, too."""

    def play(length: int) -> None:
        rig = deep(4, ahead=2)
        (request,) = rig.submit(list(range(length)), 30, speculates=True)
        for _ in range(3):
            rig.launch()
            rig.launch()
            rig.complete()
            if request.tokens[length:]:
                rig.branch(request, len(request.tokens))
                monkeypatch.setattr(rig.scheduler.pool, "is_writable", lambda page: looks_at(rig, page))
        rig.run()
        rig.check_empty()

    def looks_at(rig: Rig, page: int) -> bool:
        later = any(
            page in each.place.pages[: each.planned // 4 - each.place.first_page] for each in rig.live() if each.reach
        )
        return (looks != "at all pages" and later) or PagePool.is_writable(rig.scheduler.pool, page)

    if looks == "at all pages":
        for length in range(3, 12):
            play(length)
    else:
        with pytest.raises(AssertionError, match="which 2 requests hold"):
            for length in range(3, 12):
                play(length)


def test_a_runner_that_returns_more_tokens_than_were_planned_is_at_fault() -> None:
    rig = deep(2)
    rig.submit([1, 2, 3], 20, speculates=True)
    rig.launch()
    plan = rig.launch()
    assert plan is not None and plan.drafts == [2]
    assert counts_of(plan, StepResult([7, 8, 9], counts=[3])) == [3]
    assert list(runs_of([7, 8, 9, 10], [3, 1])) == [(0, [7, 8, 9]), (3, [10])]
    for ids, counts in (([7, 8, 9, 10], [4]), ([], [0]), ([7, 8], [1]), ([7], [1, 0])):
        with pytest.raises(ValueError, match="2 drafts"):
            counts_of(plan, StepResult(ids, counts=counts))
    bare = StepPlan(0)
    assert counts_of(bare, StepResult([])) == []


@pytest.mark.parametrize("free", [1, 2])
def test_a_shared_page_is_copied_only_if_the_next_token_has_room_too(free: int) -> None:
    """The plan of a lone request that gets no token is dropped, and with it what it would have copied."""
    rig = deep(4, pages=8, size=4)
    (request,) = rig.submit(list(range(9)), 30, speculates=True)
    rig.launch()
    rig.complete()
    pool, pages = rig.scheduler.pool, request.place.pages
    before = list(pages)
    assert (request.sure, request.room(4)) == (9, 12)
    request.forked, request.planned, request.reach = True, 12, 3  # as with three drafts in flight
    pool.share(pages[2])
    while pool.available > free:
        pool.allocate()
    plan = StepPlan(rig.scheduler.roster.step)
    assert rig.scheduler._planner.grow(plan, request, 1) == free - 1
    if free == 1:
        assert not plan.copies and not plan.entries and pages == before and pool.available == 1
    else:
        assert [old for old, _ in plan.copies] == before[2:] and [entry.place for entry in plan.entries] == [2, 3]
        assert pages[:2] == before[:2] and len(pages) == 4 and pool.available == 0
