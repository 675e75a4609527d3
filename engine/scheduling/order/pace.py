"""`Pace`: how long steps take on this device, learnt from those that have ended; never reads a clock."""

from __future__ import annotations

from headrace.engine.scheduling.plan import Capacity

__all__ = ["Pace"]

_KEEP = 0.9  # of the old value at each measurement: about the last ten steps count
_TELLING = 16  # prefilled tokens of a step from which their cost can be told apart from the rest
_FORGET = 0.998  # of what chunks cost in each step that does without them for that: it may have become less meanwhile


class Pace:
    """Running figures of steps: seconds without a prefill and of any step, and what prefilled tokens add."""

    def __init__(self) -> None:
        """Know nothing: until steps have ended, everything takes no time."""
        self.step_seconds = 0.0
        self.token_seconds = 0.0
        self.chunk_seconds = 0.0
        """Seconds that a chunk adds however few tokens it has: many on a device whose usual steps are graphs."""
        self.turn_seconds = 0.0
        """Seconds of a step with whatever was in it: how long a running request waits for its next token."""

    def observe(self, prefilled: int, seconds: float, chunks: int = 1) -> None:
        """Take in a step of so many seconds, in which so many tokens of prompts were computed, in so many chunks."""
        self.turn_seconds = _mixed(self.turn_seconds, seconds)
        if prefilled == 0:
            self.step_seconds = _mixed(self.step_seconds, seconds)
        elif prefilled >= _TELLING * chunks:
            self.token_seconds = _mixed(self.token_seconds, max(0.0, seconds - self.step_seconds) / prefilled)
        else:
            self.chunk_seconds = _mixed(self.chunk_seconds, max(0.0, seconds - self.step_seconds))

    def is_worth(self, tokens: int, rows: int) -> bool:
        """Whether computing tokens of some rows in chunks saves these more time than it costs all together.

        To be asked once for a step.

        Args:
            tokens: In all chunks, each of which takes the place of a step of its row.
            rows: Of the step.
        """
        worth = tokens * self.step_seconds >= rows * self.chunk_seconds
        if not worth:
            self.chunk_seconds *= _FORGET
        return worth

    def forget(self) -> None:
        """Know nothing again."""
        self.step_seconds = self.token_seconds = self.chunk_seconds = self.turn_seconds = 0.0

    def prefill(self, tokens: int) -> float:
        """Seconds that so many prefilled tokens take."""
        return tokens * self.token_seconds

    def budget(self, decodes: int, capacity: Capacity, target: float | None) -> int:
        """Tokens that a step may hold with so many decodes if it shall take `target` seconds, a page more at least.

        All that `capacity` allows where nothing decodes, where there is no target, or where the pace is not known yet.
        """
        most = capacity.max_batched_tokens
        if target is None or not decodes or not self.token_seconds:
            return most
        within = int(max(0.0, target - self.step_seconds) / self.token_seconds)
        return min(most, decodes + max(within, capacity.page_size))


def _mixed(old: float, new: float) -> float:
    return new if old == 0.0 else _KEEP * old + (1.0 - _KEEP) * new
