"""`Meter`: counts steps and tokens, and finds their rates; reads no clock and never changes what runs."""

from __future__ import annotations

from collections import deque

__all__ = ["Meter"]

_WINDOW_SECONDS = 5.0


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
