"""`Flights`: the steps that are launched and not committed, and whether another may follow them; launches none itself.

Two keep a device busy while the host takes in the result of the first. Where steps are short, the application's own
coroutines hold the event loop for longer than that, so that more may be launched as long as nobody can be the worse for
it: every request that runs has room in them, nobody waits for a row, and together they take `_SLACK` at most.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple, Self

from headrace.engine.scheduling.plan import Step, StepPlan
from headrace.engine.scheduling.scheduler import Scheduler

__all__ = ["FailedLaunch", "Flight", "Flights"]

_USUAL = 2
_MOST = 8
_SLACK = 0.005  # seconds for which a request that arrives, or is cancelled, may have to wait for what was launched


class Flight(NamedTuple):
    """A launched step."""

    plan: StepPlan
    step: Step


class FailedLaunch:
    """A step that could not be launched: it fails in its turn, so that steps end in the order they were planned."""

    def __init__(self, error: Exception) -> None:
        """Fail with `error`."""
        self._error = error

    def wait(self) -> Sequence[int]:
        """Raise it."""
        raise self._error


class Flights(deque[Flight]):
    """Oldest first."""

    def __init__(self, usual: int, most: int) -> None:
        """Start empty; up to `usual` steps may be in flight, up to `most` where that harms nobody."""
        super().__init__()
        self._usual = usual
        self._most = most

    @classmethod
    def of(cls, launch_ahead: int | None, device: str) -> Self:
        """Up to `EngineConfig.launch_ahead`, if that is given, on a device as in `EngineInfo.device`."""
        if launch_ahead is not None:
            return cls(launch_ahead, launch_ahead)
        return cls(_USUAL, _MOST if device.startswith("cuda") else _USUAL)

    def may_grow(self, scheduler: Scheduler) -> bool:
        """Whether another step of `scheduler` may follow; none may build on one that the device never got."""
        if not self:
            return True
        latest = self[-1]
        if isinstance(latest.step, FailedLaunch):
            return False
        if len(self) < self._usual:
            return True
        every_row = latest.plan.is_bare and len(latest.plan.decodes) == scheduler.num_running
        is_short = 0.0 < (len(self) + 1) * scheduler.pace.turn_seconds <= _SLACK
        return len(self) < self._most and every_row and is_short and not scheduler.num_waiting
