"""`DepthRule` chooses how many drafts the rows of a step may have, by measured step times and accepted drafts.

It is pure: others tell it what steps took and yielded. Next to read: counts.py, which counts for users.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

__all__ = ["DepthRule"]

_HOLD: Final = 32  # steps between two choices
_TRIAL: Final = 8  # steps of a depth that is tried, to learn what it takes and yields
_LONGEST_PAUSE: Final = 256  # steps at depth 0 between two trials
_MARGIN: Final = 1.02  # what drafts must gain over none
_KEEP: Final = 0.97  # weight of the old mean at each measurement
_OUTLIER: Final = 4.0  # times the mean: a step that was held up counts as no longer than this


class _Cell(NamedTuple):
    """Steps that take about the same time at one depth: by powers of two of their rows and of their context."""

    rows: int
    context: int


class _Mean:
    """A mean that forgets slowly, and begins as the plain mean of what there is."""

    def __init__(self) -> None:
        self.value = 0.0
        self.count = 0

    def add(self, value: float) -> None:
        self.count += 1
        self.value += (value - self.value) * max(1.0 / self.count, 1.0 - _KEEP)


class DepthRule:
    """The depth of the steps of one engine.

    A depth k yields `1 + a_1 + ... + a_k` tokens a row, where a_j is how often the j-th draft is right, and takes the
    time that steps of this depth took with about as many rows and as long contexts. The rule takes the depth with the
    most tokens a second. If that is 0, it tries drafts now and then, soon after new requests and rarely later on.
    """

    def __init__(self, most: int) -> None:
        """Choose depths from 0 to `most`."""
        self._most = most
        self._rates = [_Mean() for _ in range(most)]
        """How often each draft of a row is right, by its position in the run; a draft that there is not is wrong."""
        self._times: dict[tuple[_Cell, int], _Mean] = {}
        self._left = 0
        """Number of steps before the next choice."""
        self._pause = _HOLD
        self._is_trial = False
        self._is_due = False
        """Whether there are requests of which no draft was tried."""
        self.depth = most
        """Depth of the latest step."""

    def choose(self, rows: int, context: int) -> int:
        """Return the depth of the next step.

        Args:
            rows: Number of rows of the step that may have drafts.
            context: Mean length of their contexts in tokens.
        """
        if self._left <= 0:
            self._decide(_cell(rows, context), rows)
        self._left -= 1
        return self.depth

    def note_request(self) -> None:
        """Take note that a request begins, of which nothing is known."""
        if self.depth == 0 and not self._is_due:
            self._is_due = True
            self._left = min(self._left, _HOLD)
            self._pause = _HOLD

    def observe(self, depth: int, rows: int, context: int, seconds: float) -> None:
        """Take in the time of a step in which no prompt was computed."""
        mean = self._times.setdefault((_cell(rows, context), depth), _Mean())
        mean.add(min(seconds, _OUTLIER * mean.value) if mean.count else seconds)

    def observe_runs(self, allowed: Sequence[int], tokens: Sequence[int]) -> None:
        """Take in how many tokens the rows of a step yielded, where each was allowed so many drafts."""
        for place, rate in enumerate(self._rates):
            hits = [count > place + 1 for drafts, count in zip(allowed, tokens, strict=True) if drafts > place]
            if hits:
                rate.add(sum(hits) / len(hits))

    def _decide(self, cell: _Cell, rows: int) -> None:
        """Choose a depth for a number of steps."""
        if self._is_trial or self.depth:  # what is known is fresh
            self._is_due = False
        if not self._knows(cell, self._most):
            self._take(self._most, _TRIAL, is_trial=True)
        elif not self._knows(cell, 0):
            self._take(0, _TRIAL, is_trial=True)
        else:
            best = self._best(cell, rows)
            if best:
                self._pause = _HOLD
                self._take(best, _HOLD)
            elif self.depth == 0 and not self._is_trial:
                self._take(self._most, _TRIAL, is_trial=True)
            else:
                self._take(0, self._pause)
                self._pause = min(2 * self._pause, _LONGEST_PAUSE)

    def _take(self, depth: int, steps: int, *, is_trial: bool = False) -> None:
        self.depth, self._left, self._is_trial = depth, steps, is_trial

    def _knows(self, cell: _Cell, depth: int) -> bool:
        mean = self._times.get((cell, depth))
        return mean is not None and mean.count >= _TRIAL // 2

    def _best(self, cell: _Cell, rows: int) -> int:
        """Return the depth with the most tokens a second; depth 0 if drafts gain next to nothing."""
        none, most = self._times[cell, 0].value, self._times[cell, self._most].value
        best, best_rate, tokens = 0, _MARGIN / max(none, 1e-9), 1.0
        for depth in range(1, self._most + 1):
            tokens += self._rates[depth - 1].value
            seconds = none + (most - none) * depth / self._most
            if self._knows(cell, depth):
                seconds = self._times[cell, depth].value
            rate = tokens / max(seconds, 1e-9)
            if rate > best_rate:
                best, best_rate = depth, rate
        return best


def _cell(rows: int, context: int) -> _Cell:
    return _Cell(rows.bit_length(), (context // 512).bit_length())
