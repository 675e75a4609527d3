"""Pages come and go under a scheduler that serves: nothing is lost, nothing is computed from what went."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import suppress

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from simulation.rig import Rig, capacity, reference

from headrace.engine.errors import PromptTooLong
from headrace.engine.scheduling.memory import resizing
from headrace.engine.scheduling.request import State

VOCAB = 97


def prompt(name: int, length: int) -> list[int]:
    """One that shares nothing with another name's."""
    return [name, *((name * 31 + position * 7) % VOCAB for position in range(length - 1))]


def rig_of(pages: int = 12, *, depth: int = 1, places: int = 0, prefix_cache: bool = True) -> Rig:
    rig = Rig(capacity(pages=pages, rows=4), depth=depth, places=places, prefix_cache=prefix_cache)
    rig.scheduler.pace.observe(0, 0.01)
    rig.scheduler.pace.observe(100, 1.01)  # so that swapping pays
    return rig


@pytest.fixture(scope="module", autouse=True)
def few_copies() -> Iterator[None]:
    """Let it take several plans to move what a small pool holds."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(resizing, "_MOST_COPIES", 2)
        yield


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**32), depth=st.integers(1, 3), places=st.sampled_from([0, 5, 60]), cache=st.booleans())
def test_outputs_are_what_they_would_be_alone_however_the_pool_changes(
    seed: int, depth: int, places: int, cache: bool
) -> None:
    chance = random.Random(seed)
    rig = rig_of(20, depth=depth, places=places, prefix_cache=cache)
    shared = prompt(1, 14)
    asleep = False
    for _ in range(60):
        act = chance.random()
        if act < 0.2 and len(rig.requests) < 14:
            start = shared[: chance.randint(1, 14)]
            with suppress(PromptTooLong):
                rig.submit([*start, chance.randrange(VOCAB)], chance.randint(1, 20), n=chance.choice([1, 1, 2]))
        elif act < 0.35:
            if asleep:
                rig.wake()
                asleep = False
            else:
                rig.resize(chance.choice([1, 2, 4, 7, 12, 20, 33]), fails=chance.choice(["", "", "", "step", "launch"]))
        elif act < 0.4 and not asleep:
            rig.sleep(forget=chance.random() < 0.5)
            asleep = True
        elif act < 0.45 and rig.live():
            request = chance.choice(rig.live())
            rig.pause(request) if chance.random() < 0.5 else rig.resume(request)
        elif act < 0.48 and rig.live():
            rig.finish(chance.choice(rig.live()))
        else:
            fault = chance.choice(["memory", "step"]) if chance.random() < 0.05 else ""
            rig.launch(fault)
            if len(rig.flights) >= depth:
                rig.complete()
    if asleep:
        rig.wake()
    rig.resize(20)
    for request in rig.live(State.PAUSED):
        rig.resume(request)
    rig.run()
    rig.check_empty()


def test_pages_that_stay_are_moved_rather_than_computed_again() -> None:
    rig = rig_of(20)
    first, second = (rig.submit(prompt(name, 12), 20)[0] for name in (1, 2))
    for _ in range(4):
        rig.turn()
    rig.finish(first)
    assert max(second.place.pages) >= 4
    computed = rig.computed_tokens
    rig.resize(8)
    assert max(second.place.pages) < 8 and rig.scheduler.roster.preemptions == 0
    rig.run()
    rig.check_empty()
    assert rig.computed_tokens - computed < 20


def test_the_last_in_order_gives_way_and_comes_back_from_the_host() -> None:
    rig = rig_of(20, places=40, prefix_cache=False)
    first, second = (rig.submit(prompt(name, 16), 24)[0] for name in (1, 2))
    for _ in range(3):
        rig.turn()
    rig.resize(10)
    assert second.state is State.RUNNING
    rig.resize(6)
    assert (first.state, second.state) == (State.RUNNING, State.WAITING) and second.place.host_places
    computed = rig.computed_tokens
    rig.resize(20)
    rig.run()
    rig.check_empty()
    assert rig.computed_tokens - computed <= 2 * 24


@pytest.mark.parametrize("forget", [False, True])
def test_what_is_cached_survives_a_sleep_in_the_host_unless_it_is_forgotten(forget: bool) -> None:
    rig = rig_of(20, places=40)
    shared = prompt(1, 16)
    rig.submit(shared, 2)
    rig.run()
    rig.sleep(forget=forget)
    assert rig.scheduler.pool.num_pages == 0 and rig.scheduler.swaps.host.used == (0 if forget else 4)
    (again,) = rig.submit([*shared, 5], 2)
    assert rig.launch() is None and again.state is State.WAITING
    rig.wake()
    rig.run()
    rig.check_empty()
    assert rig.computed_tokens == 17 + (18 if forget else 2)


@pytest.mark.parametrize(("name", "cached"), [(1, 0), (2, 16), (3, 16)])
def test_the_least_recently_used_prefix_goes_first_and_the_others_stay(name: int, cached: int) -> None:
    rig = rig_of(12)
    for each in (1, 2, 3):
        rig.submit(prompt(each, 16), 1)
        rig.run()
    rig.resize(8)
    assert rig.scheduler.pool.cached == 8
    (again,) = rig.submit([*prompt(name, 16), 5], 1)
    rig.run()
    rig.check_empty()
    assert again.cached == cached


def test_limits_follow_the_pool_down_and_up() -> None:
    rig = rig_of(20)
    (request,) = rig.submit(prompt(1, 10), 60)
    assert request.limit == 70
    rig.turn()
    rig.resize(5)
    assert request.limit == 21
    with pytest.raises(PromptTooLong):
        rig.submit(prompt(2, 21), 1)
    rig.resize(9)
    assert request.limit == 37
    rig.run()
    rig.check_empty()
    assert rig.output(request) == reference(prompt(1, 10), 27, VOCAB, [0]) and rig.ends[request.id] == "length"
    rig.resize(20)
    (longer,) = rig.submit(prompt(2, 10), 60)
    rig.run()
    assert len(longer.tokens) == 70


def test_no_fewer_pages_than_somebody_already_needs() -> None:
    rig = rig_of(20)
    rig.submit(prompt(1, 30), 4)
    (request,) = rig.submit(prompt(2, 40), 4)
    assert rig.scheduler.resizing.least_pages == 10
    rig.finish(request)
    assert rig.scheduler.resizing.least_pages == 8
    rig.run()
    assert rig.scheduler.resizing.least_pages == 1


def test_a_deadline_passes_while_the_scheduler_sleeps() -> None:
    rig = rig_of(20)
    (request,) = rig.submit(prompt(1, 8), 4, deadline=5.0)
    rig.sleep()
    rig.now = 6.0
    assert rig.launch() is None and rig.ends == {request.id: "deadline"}
    rig.wake()
    rig.check_empty()


@pytest.mark.parametrize("fails", ["step", "launch"])
def test_only_those_start_over_whose_pages_were_lost_on_their_way(fails: str) -> None:
    rig = rig_of(20, prefix_cache=False)
    filler, lost, moved = (rig.submit(prompt(name, length), 12)[0] for name, length in ((1, 24), (2, 6), (3, 6)))
    rig.turn()
    rig.turn()
    rig.finish(filler)
    assert len(lost.place.pages) == len(moved.place.pages) == 2
    rig.resize(6, fails=fails)
    assert (lost.preemptions, moved.preemptions) == (1, 0) and moved.state is State.RUNNING
    rig.run()
    rig.check_empty()
