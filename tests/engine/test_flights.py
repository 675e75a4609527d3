"""How far steps are launched ahead: on with short steps of which every request goes on, and with nothing else."""

from __future__ import annotations

import pytest
from simulation.rig import capacity

from headrace.engine.scheduling.asked import Asked
from headrace.engine.scheduling.plan import StepPlan
from headrace.engine.scheduling.request import Request
from headrace.engine.scheduling.result import StepResult
from headrace.engine.scheduling.scheduler import Scheduler
from headrace.engine.steps.flights import FailedLaunch, Flight, Flights


class Done:
    """A step whose tokens are all 1."""

    def __init__(self, plan: StepPlan) -> None:
        self._plan = plan

    def wait(self) -> StepResult:
        return StepResult([1] * self._plan.size)


class Pipeline:
    """A scheduler of two rows whose steps all take the same time, and what it has launched."""

    def __init__(self, flights: Flights, seconds: float) -> None:
        shape = capacity(pages=64, size=4, rows=2, budget=8, context=100, vocab=11)
        self.scheduler, self.flights, self.seconds = Scheduler(shape, secret=b"x"), flights, seconds

    def submit(self, limit: int, prompt: int = 3) -> None:
        self.scheduler.submit(Request(Asked(limit=limit), [2] * prompt))

    def fill(self) -> int:
        """Launch what may be launched; how many steps are in flight then."""
        while self.flights.may_grow(self.scheduler) and (plan := self.scheduler.plan()) is not None:
            self.flights.append(Flight(plan, Done(plan)))
        return len(self.flights)

    def depths(self, turns: int) -> list[int]:
        """Steps in flight before each of so many commits."""
        found = []
        for _ in range(turns):
            found.append(self.fill())
            flight = self.flights.popleft()
            self.scheduler.commit(flight.plan, flight.step.wait())
            self.scheduler.pace.observe(0, self.seconds)
        return found


@pytest.mark.parametrize(("milliseconds", "depth"), [(0.1, 8), (0.7, 7), (1.2, 4), (2.4, 2), (9.0, 2)])
def test_as_many_steps_are_launched_as_take_five_milliseconds(milliseconds: float, depth: int) -> None:
    pipeline = Pipeline(Flights.of(None, "cuda:0"), milliseconds / 1000)
    pipeline.submit(90)
    pipeline.submit(90)
    depths = pipeline.depths(40)
    assert depths[0] == 2, "nobody knows yet how long steps take"
    assert set(depths[4:]) == {depth}


@pytest.mark.parametrize(
    ("asked", "device", "depth"), [(None, "cpu", 2), (3, "cuda:0", 3), (1, "cuda:0", 1), (8, "cpu", 8)]
)
def test_what_was_asked_for_holds_and_a_cpu_runs_no_further(asked: int | None, device: str, depth: int) -> None:
    pipeline = Pipeline(Flights.of(asked, device), 0.0001)
    pipeline.submit(90)
    assert set(pipeline.depths(30)) == {depth}


def test_nobody_waits_behind_more_than_the_usual_steps() -> None:
    pipeline = Pipeline(Flights.of(None, "cuda:0"), 0.0001)
    for _ in range(2):
        pipeline.submit(90)
    assert pipeline.depths(10)[-1] == 8
    pipeline.submit(90)
    assert pipeline.depths(30)[8:] == [2] * 22


def test_a_request_about_to_end_takes_the_rest_no_further() -> None:
    pipeline = Pipeline(Flights.of(None, "cuda:0"), 0.0001)
    pipeline.submit(90)
    pipeline.submit(20)
    depths = pipeline.depths(30)
    assert max(depths) == 8 and min(depths[4:25]) == 2 and depths[-1] == 8


def test_nothing_follows_a_step_that_the_device_never_got() -> None:
    pipeline = Pipeline(Flights(4, 4), 0.0001)
    pipeline.submit(90)
    plan = pipeline.scheduler.plan()
    assert plan is not None
    pipeline.flights.append(Flight(plan, FailedLaunch(MemoryError())))
    assert not pipeline.flights.may_grow(pipeline.scheduler)
    with pytest.raises(MemoryError):
        pipeline.flights[0].step.wait()
