"""`Flights` holds launched steps that are not committed, and decides whether another may follow; it launches none.

Two steps keep a device busy while the host processes the result of the first. With short steps, the application's own
coroutines hold the event loop for longer than that, so more steps may be launched if that delays nobody: every running
request has room in them, no request waits for a row, and together they take `_SLACK` at most.
"""

from __future__ import annotations

from collections import deque
from typing import NamedTuple, Self

from headrace.engine.scheduling.plan import Step, StepPlan
from headrace.engine.scheduling.result import StepResult
from headrace.engine.scheduling.scheduler import Scheduler

__all__ = ["FailedLaunch", "Flight", "Flights"]

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
