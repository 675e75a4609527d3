"""The policies: whose turn it is, bounds on waiting, shares by tokens, deadlines; and the same answers under each."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import anyio
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scripted import Gate, expected_ids, greedy, read, serving
from scripted import capacity as device
from simulation.rig import Rig, capacity

from headrace.engine import Engine, InvalidParams, Overloaded
from headrace.engine.scheduling.asked import Asked
from headrace.engine.scheduling.order.pace import Pace
from headrace.engine.scheduling.policies import POLICIES, Ageing, Deadlines, SizeClasses
from headrace.engine.scheduling.policy import FirstCome, Policy
from headrace.engine.scheduling.request import Request, State
from headrace.engine.scheduling.scheduler import Scheduler


def words(name: int, length: int) -> list[int]:
    """A prompt that shares nothing with another name's."""
    return [name // 97, *((name * 31 + position * 7) % 97 for position in range(length - 1))]


def a_request(priority: int = 0, adapter: str | None = None, arrived: float = 0.0) -> Request:
    return Request(Asked(limit=2, priority=priority, adapter=adapter), [1], arrived=arrived, id=0)


def starts(rig: Rig, seconds: float = 0.0) -> list[int]:
    """Run to the end, with so many seconds a turn; the ids in the order in which they got their rows."""
    order: list[int] = []
    while rig.turn():
        rig.now += seconds
        order += [r.id for r in rig.requests if r.latest_step >= 0 and r.id not in order]
    rig.check_empty()
    return order


# -- ageing ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("policy", "adapter", "wait", "score"),
    [
        (Ageing(), None, 0.0, 3.0),
        (Ageing(), None, 30.0, 3.5),
        (Ageing(), "a", 60.0, 4.5),
        (Ageing(), "a", 6000.0, 13.5),
        (Ageing(moe=2.0), None, 600.0, 14.0),
    ],
)
def test_the_preset(policy: Ageing, adapter: str | None, wait: float, score: float) -> None:
    request = a_request(adapter=adapter, arrived=100.0)
    assert policy.score(request, 100.0 + wait) == pytest.approx(score)
    request.asked = replace(request.asked, priority=1)
    assert policy.score(request, 100.0 + wait) == pytest.approx(score / 2)


def test_no_priority_is_too_far_away_for_a_score() -> None:
    far = [10**400, 1000, 1, 0, -1, -1000, -(10**400)]
    for ratio in (1.0, 1.5, 3.0):
        policy = Ageing(ratio=ratio)
        scores = [policy.score(a_request(priority=each), 0.0) for each in far]
        assert scores == sorted(scores) and len(set(scores)) >= (1 if ratio == 1.0 else 5)


def test_one_of_low_priority_is_served_in_the_end_beside_a_stream_of_higher_ones() -> None:
    rig = Rig(capacity(rows=1), policy=Ageing())
    rig.submit(words(0, 4), 1)
    (low,) = rig.submit(words(1, 4), 1, priority=1)
    name = 2
    while low.state is State.WAITING:
        rig.submit(words(name, 4), 1)
        rig.turn()
        rig.now += 10.0
        name += 1
    assert 180.0 < rig.now <= 240.0  # half of (3 + 180 s / 60 s) is 3, and who is ahead has waited too
    rig.run()


# -- size classes ---------------------------------------------------------------------------------------------------


def test_short_prompts_come_first_until_a_long_one_has_waited_too_long() -> None:
    rig = Rig(capacity(rows=1, pages=200, budget=64), policy=SizeClasses(short=8, long=16, most_wait=5.0))
    lengths = [4, 20, 10, 4, 10, 4, 20, 4]
    for name, length in enumerate(lengths):
        rig.submit(words(name, length), 1)
    assert starts(rig) == [0, 3, 5, 7, 2, 4, 1, 6]

    for name, length in enumerate(lengths):
        rig.submit(words(name + 10, length), 1)
    rig.turn()
    rig.now += 6.0
    rig.submit(words(30, 4), 1)
    assert starts(rig)[8:] == [8, 9, 10, 11, 12, 13, 14, 15, 16]


def test_a_short_prompt_overtakes_a_long_one_that_is_begun() -> None:
    rig = Rig(capacity(rows=4, pages=200, budget=16), policy=SizeClasses(short=8, long=16))
    (long,) = rig.submit(words(0, 100), 1)
    rig.turn()
    (short,) = rig.submit(words(1, 4), 1)
    plan = rig.launch()
    assert plan is not None
    assert [(work.request.id, work.num_tokens) for work in plan.works] == [(long.id, 12), (short.id, 4)]
    rig.run()
    rig.check_empty()


def test_a_begun_prompt_that_has_waited_too_long_is_not_overtaken() -> None:
    rig = Rig(capacity(rows=4, pages=200, budget=16), policy=SizeClasses(short=8, long=16, most_wait=5.0))
    (long,) = rig.submit(words(0, 40), 1)
    rig.turn()
    for name in range(1, 4):
        rig.submit(words(name, 7), 1)
    rig.now += 5.0
    plan = rig.launch()
    assert plan is not None and [(work.request.id, work.num_tokens) for work in plan.works] == [(long.id, 16)]
    rig.run()
    rig.check_empty()


def test_one_of_low_priority_that_has_waited_too_long_is_found_behind_newcomers_of_its_class() -> None:
    rig = Rig(capacity(rows=1, pages=200, budget=64), policy=SizeClasses(short=8, long=16, most_wait=5.0))
    rig.submit(words(0, 4), 3)
    rig.turn()
    (low,) = rig.submit(words(1, 20), 1, priority=1)
    rig.now += 5.0
    (high,), (short,) = rig.submit(words(2, 20), 1), rig.submit(words(3, 4), 1)
    assert starts(rig) == [0, low.id, short.id, high.id]


# -- deadlines ------------------------------------------------------------------------------------------------------


def test_the_earliest_deadline_is_first_and_those_without_one_are_last() -> None:
    rig = Rig(capacity(rows=1), policy=Deadlines())
    for deadline in (9.0, None, 3.0, 6.0, None, 1.0):
        adapter = "a" if len(rig.requests) % 2 else None  # which do not take turns
        rig.submit(words(len(rig.requests), 4), 1, deadline=deadline, adapter=adapter)
    assert starts(rig) == [5, 2, 3, 0, 1, 4]


def test_what_is_due_later_does_not_start_before_a_begun_prompt_goes_on() -> None:
    """Also where it may start before another that is begun."""
    rig = Rig(capacity(rows=4, pages=200, budget=16), policy=Deadlines())
    rig.submit(words(0, 60), 1)
    rig.turn()
    (begun,) = rig.submit(words(1, 40), 1, deadline=50.0)
    rig.turn()
    (later,) = rig.submit(words(2, 10), 1, deadline=60.0)
    planned = []
    while later.id not in planned:
        plan = rig.launch()
        assert plan is not None
        planned += [work.request.id for work in plan.works]
        rig.complete()
    assert planned == [begun.id, begun.id, later.id]
    rig.run()
    rig.check_empty()


@pytest.mark.parametrize("policy", POLICIES)
def test_under_every_policy_what_is_too_late_is_not_computed(policy: str) -> None:
    rig = Rig(capacity(rows=2, budget=16), depth=2, policy=POLICIES[policy]())
    runs, waits, none = (
        rig.submit(words(name, 6), 40, deadline=deadline)[0] for name, deadline in enumerate((2.0, 3.0, None))
    )
    rig.turn()
    (late,) = rig.submit(words(5, 30), 4, deadline=1.0)
    for _ in range(4):
        rig.turn()
    assert runs.place.pages and rig.output(runs)
    rig.now = 2.5
    rig.turn()
    assert (rig.ends[runs.id], rig.ends[late.id]) == ("deadline", "deadline")
    assert late.planned == 0 and waits.id not in rig.ends
    rig.now = 3.0
    rig.run()
    rig.check_empty()
    assert rig.ends[waits.id] == "deadline" and rig.ends[none.id] == "length"


def test_what_cannot_be_met_is_refused_or_never_begun() -> None:
    rig = Rig(capacity(rows=1, pages=100, budget=50), policy=Deadlines())
    rig.scheduler.pace.observe(0, 0.1)
    rig.scheduler.pace.observe(50, 0.6)  # 10 ms a token
    rig.submit(words(0, 100), 1, tenant="a", deadline=1.1)
    with pytest.raises(Overloaded, match=r"^deadline: the first token is expected in 1\.400 s") as refused:
        rig.submit(words(1, 40), 1, tenant="a", deadline=1.2)
    assert refused.value.field == "deadline" and refused.value.limit == {"ge": pytest.approx(1.4)}
    (other,) = rig.submit(words(2, 40), 1, tenant="b", deadline=1.2)  # nothing waits before it in its own share
    (whole,) = rig.submit(words(3, 10), 20, tenant="b", deadline=1.9)  # 10 tokens and 20 steps take 2.1 s
    rig.run()
    assert rig.ends[other.id] == "length" and rig.ends[whole.id] == "deadline" and whole.planned == 0


@pytest.mark.parametrize("policy", ["first_come", "deadlines"])
@pytest.mark.parametrize("prefilled", [0, 20])
def test_one_slow_step_does_not_turn_all_away_for_ever(policy: str, prefilled: int) -> None:
    """Of those that come one at a time, each with a deadline, all but the first are served."""
    rig = Rig(capacity(rows=2), policy=POLICIES[policy]())
    rig.scheduler.pace.observe(prefilled, 5.0)
    ended = []
    for name in range(4):
        (request,) = rig.submit(words(name, 20), 2, deadline=rig.now + 2.0)
        rig.run()
        ended.append(rig.ends[request.id])
    assert ended[1:] == ["length"] * 3
    rig.check_empty()


def test_forced_tokens_are_computed_at_once_where_that_costs_less_than_it_saves() -> None:
    pace = Pace()
    assert pace.is_worth(1, 256)  # nothing is known yet
    pace.observe(0, 0.005)
    pace.observe(40, 0.013, chunks=8)
    assert pace.token_seconds == 0.0, "of which nothing is learnt about prompts"
    assert pace.is_worth(4, 1) and not pace.is_worth(1, 1) and not pace.is_worth(40, 64)
    tries = next(count for count in range(1000) if pace.is_worth(40, 64))
    assert 200 < tries, "it is tried again, but seldom"


def test_an_answer_that_is_nearly_done_counts_what_is_left_of_it() -> None:
    pace = Pace()
    pace.observe(0, 0.1)
    request = Request(Asked(limit=2**62, deadline=6.0), [1] * 240, prompt_len=40)
    policy = Deadlines(answer=256)
    assert policy.worthwhile(request, 0.0, pace) and not policy.worthwhile(request, 0.5, pace)


def test_deadlines_of_what_has_ended_are_not_kept() -> None:
    scheduler = Scheduler(capacity(), secret=b"secret")
    for _ in range(1000):
        request = Request(Asked(limit=3, deadline=1e6), [1, 2])
        scheduler.submit(request)
        scheduler.finish(request, "cancelled")
    assert len(scheduler.deadlines) <= 200 and scheduler.deadlines.next is None


@pytest.mark.anyio
async def test_a_stream_ends_at_its_deadline_running_queued_or_paused() -> None:
    gate = Gate()
    async with serving(device(max_rows=1), gate=gate, max_unread_tokens=4) as engine:
        paused = engine.stream("paused", greedy(500), deadline=0.4)
        await paused.admitted()
        assert (await anext(paused)).position == 0
        queued = engine.stream("queued", greedy(4), deadline=0.2)
        gate.hold()
        await anyio.sleep(0.25)
        gate.release()
        items = await read(queued)
        assert [item.finish_reason for item in items] in (["deadline"], [None] * 3 + ["length"])
        await anyio.sleep(0.25)  # nothing of it is read: it pauses, and the engine has nothing to do
        assert engine.stats().paused == 0
        items = await read(paused)
        assert items[-1].finish_reason == "deadline" and items[-1].id is None
        assert [item.id for item in items[:-1]] == expected_ids("paused", len(items))[1:]
        assert (await engine.generate("other", greedy(3), deadline=20)).choices[0].finish_reason == "length"


@pytest.mark.anyio
@pytest.mark.parametrize("deadline", [0, -1.0, float("nan"), float("inf"), "1", True, pytest.param(10**400, id="huge")])
async def test_what_is_no_deadline_is_refused(deadline: Any) -> None:
    async with serving() as engine:
        with pytest.raises(InvalidParams, match="^deadline: must be more than 0 seconds") as refused:
            await engine.generate("a" * 900, greedy(1), deadline=deadline)
        assert refused.value.field == "deadline"


# -- all of them ----------------------------------------------------------------------------------------------------


@settings(max_examples=60, deadline=None)
@given(
    name=st.sampled_from(sorted(POLICIES)),
    sizes=st.lists(st.tuples(st.integers(1, 20), st.integers(1, 17), st.sampled_from("abc")), max_size=30),
    depth=st.integers(1, 3),
)
def test_in_a_tiny_pool_everybody_ends_under_every_policy(
    name: str, sizes: list[tuple[int, int, str]], depth: int
) -> None:
    rig = Rig(capacity(pages=10, size=4, rows=6, budget=12), depth=depth, policy=POLICIES[name]())
    for place, (length, count, owner) in enumerate(sizes):
        rig.submit(words(place, length), count, tenant=owner)
    rig.run(turns=4000)
    rig.check_empty()
    assert max((request.preemptions for request in rig.requests), default=0) <= 3 + len(sizes)


class ShortestFirst(FirstCome):
    """An application's own."""

    def place(self, request: Request) -> Any:
        return request.prompt_len, request.id


@pytest.mark.anyio
@pytest.mark.parametrize("policy", [*POLICIES, {"name": "fair_share", "weights": {"a": 2}}, ShortestFirst()])
async def test_an_engine_serves_by_the_policy_that_it_is_given(policy: Any) -> None:
    assert not isinstance(policy, FirstCome) or isinstance(policy, Policy)
    gate = Gate()
    async with serving(device(max_rows=1), gate=gate, policy=policy) as engine:
        gate.hold()
        prompts = ["a" * 200, "a" * 20, "a" * 140, "a" * 3]
        streams = [engine.stream(prompt, greedy(3)) for prompt in ["first", *prompts]]
        for stream in streams:
            await stream.admitted()
        gate.release()
        for prompt, stream in zip(["first", *prompts], streams, strict=True):
            assert [item.id for item in await read(stream)] == expected_ids(prompt, 3)
        taken = sorted(range(1, 5), key=lambda place: streams[place].taken_up or 0.0)
        by_size = {"size_classes": [2, 4, 1, 3]}.get(policy if isinstance(policy, str) else "", [1, 2, 3, 4])
        assert taken == ([4, 2, 3, 1] if isinstance(policy, FirstCome) else by_size)


@pytest.mark.parametrize(
    ("policy", "field"),
    [
        ("lottery", "policy"),
        ({}, "policy"),
        ({"name": ["fair_share"]}, "policy"),
        (3, "policy"),
        ({"name": "first_come", "weights": {}}, "policy"),
        ({"name": "fair_share", "weights": {"a": 0}}, "policy.weights.a"),
        ({"name": "ageing", "ratio": 0.5}, "policy.ratio"),
        ({"name": "size_classes", "tiny": 1}, "policy.tiny"),
    ],
)
def test_what_is_no_policy_is_refused_by_its_field(policy: Any, field: str) -> None:
    with pytest.raises(InvalidParams) as refused:
        Engine("model", policy=policy)
    assert refused.value.field == field
