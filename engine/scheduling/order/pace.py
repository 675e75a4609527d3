"""`Pace` measures how long steps take on this device, from those that have ended; never reads a clock."""

from __future__ import annotations

from headrace.engine.scheduling.plan import Capacity

__all__ = ["Pace"]

_KEEP = 0.9  # weight of the old value at each measurement: about the last ten steps count
_TELLING = 16  # prefilled tokens in a step from which their cost can be told from the rest
_FORGET = 0.998  # decay of the cost of chunks in each step that avoids them as too costly: it may have fallen meanwhile


class Pace:
    """Running averages of step times: steps without prefill, any steps, and the time that prefilled tokens add."""

    def __init__(self) -> None:
        """Start without measurements, so that everything is expected to take no time."""
        self.step_seconds = 0.0
        self.token_seconds = 0.0
        self.chunk_seconds = 0.0
        """Seconds that a chunk adds even with few tokens; large where steps without one are captured graphs."""
        self.turn_seconds = 0.0
        """Seconds of a step of any kind, which is the time that a running request waits for its next token."""

    def observe(self, prefilled: int, seconds: float, chunks: int = 1) -> None:
        """Take in a step of `seconds`, which computed `prefilled` prompt tokens in `chunks` chunks."""
        self.turn_seconds = _mixed(self.turn_seconds, seconds)
        if prefilled == 0:
            self.step_seconds = _mixed(self.step_seconds, seconds)
        elif prefilled >= _TELLING * chunks:
            self.token_seconds = _mixed(self.token_seconds, max(0.0, seconds - self.step_seconds) / prefilled)
        else:
            self.chunk_seconds = _mixed(self.chunk_seconds, max(0.0, seconds - self.step_seconds))

    def is_worth(self, tokens: int, rows: int) -> bool:
        """Return whether tokens computed in chunks, not one a step, save their rows more time than all rows lose by it.

        Call this once for each step.

        Args:
            tokens: Tokens in all chunks, each of which takes the place of a step of its row.
            rows: Rows of the step.
        """
        worth = tokens * self.step_seconds >= rows * self.chunk_seconds
        if not worth:
            self.chunk_seconds *= _FORGET
        return worth

    def forget(self) -> None:
        """Forget all measurements."""
        self.step_seconds = self.token_seconds = self.chunk_seconds = self.turn_seconds = 0.0

    def prefill(self, tokens: int) -> float:
        """Return the seconds that so many prefilled tokens take."""
        return tokens * self.token_seconds

    def budget(self, decodes: int, capacity: Capacity, target: float | None) -> int:
        """Return how many tokens a step with `decodes` may hold to take `target` seconds, and at least a page more.

        Without decodes, a target or measurements, that is all that `capacity` allows.
        """
        most = capacity.max_batched_tokens
        if target is None or not decodes or not self.token_seconds:
            return most
        within = int(max(0.0, target - self.step_seconds) / self.token_seconds)
        return min(most, decodes + max(within, capacity.page_size))


def _mixed(old: float, new: float) -> float:
    return new if old == 0.0 else _KEEP * old + (1.0 - _KEEP) * new
