"""`Flights` holds launched steps that are not committed, and decides whether another may follow; `Meter` counts them.

Two steps keep a device busy while the host processes the result of the first. With short steps, the application's own
coroutines hold the event loop for longer than that, so more steps may be launched if that delays nobody: every running
request has room in them, no request waits for a row, and together they take `_SLACK` at most. Neither class launches
a step or reads a clock.
"""

from __future__ import annotations

from collections import deque
from typing import NamedTuple, Self

from headrace.engine.scheduling.plan import Step, StepPlan
from headrace.engine.scheduling.result import StepResult
from headrace.engine.scheduling.scheduler import Scheduler

__all__ = ["FailedLaunch", "Flight", "Flights", "Meter"]

_WINDOW_SECONDS = 5.0  # over which rates are counted
_USUAL = 2
_MOST = 8
_SLACK = 0.005  # longest delay in seconds that launched steps may cause for a new or cancelled request


class Flight(NamedTuple):
    """A launched step and its plan."""

    plan: StepPlan
    step: Step


class FailedLaunch:
    """A step that could not be launched. It fails when it is waited for, so that steps end in the planned order."""

    def __init__(self, error: Exception) -> None:
        """Fail with `error`."""
        self._error = error

    def wait(self) -> StepResult:
        """Raise the error of the launch."""
        raise self._error


class Flights(deque[Flight]):
    """Launched steps that are not committed, oldest first."""

    def __init__(self, usual: int, most: int) -> None:
        """Start empty; `usual` steps may be in flight, and up to `most` if that delays nobody."""
        super().__init__()
        self._usual = usual
        self._most = most

    @classmethod
    def of(cls, launch_ahead: int | None, device: str) -> Self:
        """Return an empty queue for `EngineConfig.launch_ahead` steps, or as many as suit `device` if that is None."""
        if launch_ahead is not None:
            return cls(launch_ahead, launch_ahead)
        return cls(_USUAL, _MOST if device.startswith("cuda") else _USUAL)

    def may_grow(self, scheduler: Scheduler) -> bool:
        """Return whether another step may be launched; none may follow a step that failed to launch."""
        if not self:
            return True
        latest = self[-1]
        if isinstance(latest.step, FailedLaunch):
            return False
        if len(self) < self._usual:
            return True
        every_row = latest.plan.is_bare and len(latest.plan.decodes) == scheduler.roster.num_running
        is_short = 0.0 < (len(self) + 1) * scheduler.pace.turn_seconds <= _SLACK
        return len(self) < self._most and every_row and is_short and not scheduler.roster.num_waiting


class Meter:
    """Counter of steps and tokens, and of their rates over the last seconds."""

    def __init__(self) -> None:
        """Start at zero."""
        self.steps = 0
        self.launched_steps = 0
        self.generated_tokens = 0
        self._busy = 0.0
        self._recent: deque[tuple[float, float, int]] = deque()
        self._latest = 0.0

    def launched(self, now: float) -> None:
        """Count a launched step; `now` in seconds."""
        if self.launched_steps == self.steps:
            self._latest = now  # after idling, a step's time starts at its launch
        self.launched_steps += 1

    def committed(self, now: float, generated: int) -> float:
        """Count a committed step that generated so many tokens; return its duration in seconds."""
        self.steps += 1
        self.generated_tokens += generated
        seconds = now - self._latest
        self._recent.append((now, seconds, generated))
        self._busy += seconds
        self._latest = now
        while self._recent[0][0] < now - _WINDOW_SECONDS:
            self._recent.popleft()
        return seconds

    def step_age(self, now: float) -> float:
        """Return the seconds since a step last ended, at `now`, while a step is in flight; else 0."""
        return now - self._latest if self.launched_steps > self.steps else 0.0

    def busy_seconds(self, now: float) -> float:
        """Return the total seconds for which a step was in flight until `now`; never falls."""
        return self._busy + self.step_age(now)

    def rates(self, now: float) -> tuple[float, float]:
        """Return (generated tokens per second, seconds per step) while busy, over the last seconds before `now`."""
        recent = [entry for entry in self._recent if entry[0] >= now - _WINDOW_SECONDS]
        seconds = sum(duration for _, duration, _ in recent)
        if seconds <= 0.0:
            return 0.0, 0.0
        return sum(generated for *_, generated in recent) / seconds, seconds / len(recent)
