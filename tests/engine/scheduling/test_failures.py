"""What a step that fails, or a row that cannot be right, means: those it concerns end, everybody else is right."""

from __future__ import annotations

import itertools

import pytest
from simulation.rig import Rig, capacity

from headrace.engine.errors import NonFiniteLogits, NoTokenLeft, RequestFailed
from headrace.engine.scheduling.plan import StepPlan
from headrace.engine.scheduling.request import State
from headrace.engine.scheduling.result import NoToken
from headrace.engine.testing import ScriptedStep

SHARED = [position * 5 % 97 for position in range(16)]


def rig_of(depth: int, **shape: int) -> Rig:
    return Rig(capacity(**{"pages": 40, "size": 4, "rows": 4, "budget": 64, **shape}), depth=depth)


@pytest.mark.parametrize("fault", ["step", "launch"])
@pytest.mark.parametrize("depth", [1, 2, 3])
def test_a_failed_step_ends_its_requests_once_and_its_pages_are_never_found_again(depth: int, fault: str) -> None:
    rig = rig_of(depth)
    (doomed,) = rig.submit([*SHARED, 1], 8)
    rig.launch(fault)
    while rig.launch() is not None:
        pass
    (emission,) = rig.complete()
    assert emission.request is doomed and isinstance(emission.error, RequestFailed)
    assert emission.token is None and emission.finish_reason is None and doomed.failed
    rig.run()
    assert rig.scheduler.pool.cached == 0
    (again,) = rig.submit([*SHARED, 1], 8)
    rig.run()
    rig.check_empty()
    assert again.cached == 0 and rig.ends == {doomed.id: "RequestFailed", again.id: "length"}


def test_what_was_committed_before_a_failure_is_still_found() -> None:
    rig = rig_of(1, budget=8)
    rig.submit([*SHARED, 1], 8)
    rig.turn()
    rig.launch("step")
    rig.complete()
    (again,) = rig.submit([*SHARED, 1], 1)
    rig.run()
    rig.check_empty()
    assert again.cached == 8


@pytest.mark.parametrize("depth", [2, 3])
@pytest.mark.parametrize("n", [1, 2, 3])
def test_those_who_read_pages_of_a_failed_step_start_over_and_are_right(depth: int, n: int) -> None:
    rig = rig_of(depth)
    (doomed,) = rig.submit([*SHARED, 50], 4)
    sharers = rig.submit([*SHARED, 60, 61], 4, n=n)
    rig.launch("step")
    while rig.launch() is not None:
        pass
    assert sharers[0].cached == len(SHARED)
    rig.complete()
    assert sharers[0].discard == sharers[0].in_flight > 0
    rig.run()
    rig.check_empty()
    assert rig.ends == {doomed.id: "RequestFailed"} | {request.id: "length" for request in sharers}


@pytest.mark.parametrize("turns", range(6))
def test_choices_survive_the_failure_of_one_of_them(turns: int) -> None:
    rig = rig_of(2, rows=2)
    (other,) = rig.submit([7, 8, 9], 5)
    choices = rig.submit([*SHARED, 3, 4], 5, n=4)
    for _ in range(turns):
        rig.turn()
    rig.launch("step")
    rig.run()
    rig.check_empty()
    ends = [rig.ends[request.id] for request in (other, *choices)]
    assert set(ends) <= {"length", "RequestFailed"} and ends[-1] == "length"


def test_a_paused_sharer_of_a_failed_step_starts_over_when_it_is_resumed() -> None:
    rig = rig_of(2)
    rig.submit([*SHARED, 50], 4)
    (sharer,) = rig.submit([*SHARED, 60], 4)
    rig.launch("step")
    rig.launch()
    rig.pause(sharer)
    rig.complete()
    rig.complete()
    assert sharer.state is State.PAUSED and sharer.row < 0 and not sharer.place.pages
    rig.resume(sharer)
    rig.run()
    rig.check_empty()
    assert rig.ends[sharer.id] == "length"


TOKENS = [
    (NoToken.NON_FINITE, NonFiniteLogits),
    (NoToken.NOTHING_LEFT, NoTokenLeft),
    (97, RequestFailed),
    (-2, RequestFailed),
]


@pytest.mark.parametrize(("token", "error"), TOKENS)
@pytest.mark.parametrize("depth", [1, 2, 3])
def test_a_token_that_cannot_be_ends_its_request_alone(
    depth: int, token: int | NoToken, error: type[RequestFailed]
) -> None:
    rig = rig_of(depth)
    requests = [rig.submit([name, name + 1, 5], 6)[0] for name in range(3)]
    rig.turn()
    rig.launch()
    errors = {emission.request: type(emission.error) for emission in rig.complete(bad=(1, token))}
    assert [errors[request] for request in requests] == [type(None), error, type(None)]
    rig.run()
    rig.check_empty()
    assert [rig.ends[request.id] for request in requests] == ["length", error.__name__, "length"]
    assert len(rig.output(requests[1])) == 1


def test_what_a_step_returns_for_a_row_that_samples_nothing_means_nothing() -> None:
    rig = rig_of(1, budget=8)
    (request,) = rig.submit(SHARED, 2)
    rig.launch()
    assert rig.complete(bad=(0, NoToken.NON_FINITE)) == []
    rig.run()
    rig.check_empty()
    assert rig.ends[request.id] == "length"


@pytest.mark.parametrize("depth", [2, 3])
def test_tokens_sampled_after_a_stop_are_dropped(depth: int) -> None:
    rig = rig_of(depth)
    (free,) = rig.submit(SHARED, 6)
    rig.run()
    stop = rig.output(free)[2]
    (stopped,) = rig.submit(SHARED, 6, stop_ids=frozenset({stop}))
    rig.run()
    rig.check_empty()
    assert rig.output(stopped) == rig.output(free)[: rig.output(free).index(stop) + 1]
    assert rig.ends[stopped.id] == "stop" and stopped.finish_reason == "stop"


def test_pages_behind_logits_that_were_not_finite_are_not_found_again() -> None:
    rig = Rig(capacity(pages=40, size=4, rows=4), depth=2)
    rig.submit(SHARED, 6)
    rig.launch()
    rig.complete(bad=(0, NoToken.NON_FINITE))
    rig.run()
    (again,) = rig.submit(SHARED, 6)
    rig.run()
    rig.check_empty()
    assert again.cached == 0


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_steps_that_find_no_memory_are_tried_again_and_nobody_fails(depth: int) -> None:
    rig = rig_of(depth)
    requests = [rig.submit([*SHARED, name], 8)[0] for name in range(4)]
    for _ in range(2):
        rig.launch("memory")
        rig.turn()
    rig.run()
    rig.check_empty()
    assert {rig.ends[request.id] for request in requests} == {"length"}
    assert rig.scheduler.failures.retries > 0


def test_steps_are_half_as_large_after_each_that_found_no_memory_until_one_request_fails_alone() -> None:
    rig = rig_of(1, budget=32)
    requests = [rig.submit([name, *SHARED, name], 80)[0] for name in range(4)]
    sizes = []
    while not rig.ends:
        plan = rig.launch("memory")
        assert plan is not None
        sizes.append((plan.size, plan.tokens))
        rig.complete()
    assert sizes[0] == (2, 32) and sizes[-1] == (1, 4)
    assert all(later[1] <= -(-earlier[1] // 2) for earlier, later in itertools.pairwise(sizes))
    assert rig.ends == {requests[0].id: "OutOfMemory"}
    rig.run()
    rig.check_empty()
    assert [rig.ends[request.id] for request in requests[1:]] == ["length"] * 3
    assert not rig.scheduler.failures.is_cautious  # they were many steps


def test_while_steps_are_small_who_has_begun_goes_on_before_others_start() -> None:
    """Also where one before it cannot go on, since the host still chooses its token."""
    rig = rig_of(2, budget=32)
    (chosen,) = rig.submit(SHARED, 8, hooked=True)
    rig.turn()
    (begun,) = rig.submit([1, *SHARED, 1, *SHARED], 1)
    rig.launch("memory")
    while rig.flights:
        rig.complete()
    (late,) = rig.submit([2, *SHARED], 1)
    assert rig.scheduler.failures.most_rows == 1
    planned = []
    for _ in range(12):
        plan = rig.launch()
        planned += [work.request.id for work in plan.works] if plan else []
        rig.complete()
    assert begun.id in planned and (late.id not in planned or planned.index(late.id) > planned.index(begun.id))
    rig.run()
    rig.check_empty()
    assert rig.ends[chosen.id] == rig.ends[begun.id] == rig.ends[late.id] == "length"


@pytest.mark.parametrize("alone", [False, True])
def test_one_that_never_finds_memory_is_the_only_one_to_fail(alone: bool) -> None:
    """Also where its steps may not be made smaller, since they depend on its tokens alone."""
    rig = rig_of(2, rows=8)
    requests = [rig.submit([name, *SHARED], 6, alone=alone and name == 3)[0] for name in range(6)]
    doomed = requests[3]
    launch = rig.launch

    def unlucky(fault: str = "") -> StepPlan | None:
        before = rig.runner.launch

        def launched(plan: StepPlan) -> ScriptedStep:
            if any(work.request is doomed for work in plan.works):
                rig.faults[plan.step] = MemoryError("scripted")
            return before(plan)

        rig.runner.launch = launched  # type: ignore[method-assign]
        try:
            return launch(fault)
        finally:
            rig.runner.launch = before  # type: ignore[method-assign]

    rig.launch = unlucky  # type: ignore[method-assign]
    rig.run()
    rig.check_empty()
    ends = {request.id: "OutOfMemory" if request is doomed else "length" for request in requests}
    assert rig.ends == ends


def test_drafts_are_left_out_where_a_step_with_them_finds_no_memory() -> None:
    rig = Rig(capacity(budget=16), drafts=4, choose=lambda rows, context: 4)
    (request,) = rig.submit([1, 2, 3], 40, speculates=True)
    rig.turn()
    launch = rig.runner.launch

    def launch_if_small(plan: StepPlan) -> ScriptedStep:
        if plan.tokens > 2:
            rig.faults[plan.step] = MemoryError("scripted")
        return launch(plan)

    rig.runner.launch = launch_if_small  # type: ignore[method-assign]
    rig.run()
    rig.check_empty()
    assert rig.scheduler.failures.retries and rig.ends == {request.id: "length"}
