"""`DepthRule` chooses how many drafts the rows of a step may have, by measured step times and accepted drafts.

It is pure: others tell it what steps took and yielded. Next to read: counts.py, which counts for users.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Final

__all__ = ["DepthRule"]

_HOLD: Final = 32  # steps between two choices
_TRIAL: Final = 4  # rows of steps of a depth that is tried, to learn what it takes and yields
_SHORTEST_TRIAL: Final = 2  # steps
_ENOUGH: Final = 2  # measurements from which a mean is believed
_LOST: Final = 0.01  # share of the time that trials may lose
_LONGEST_PAUSE: Final = 512  # steps with drafts between two without, or at depth 0 between trials that lose little
_MARGIN: Final = 1.03  # what drafts must gain over none
_KEEP: Final = 0.97  # weight of the old mean at each measurement
_OUTLIER: Final = 3.0  # times the mean: a step that was held up counts as no longer than this


class _Mean:
    """A mean that forgets slowly, and begins as the plain mean of what there is."""

    def __init__(self) -> None:
        self.value = 0.0
        self.count = 0

    def add(self, value: float) -> None:
        self.count += 1
        self.value += (value - self.value) * max(1.0 / self.count, 1.0 - _KEEP)


class _Times:
    """What steps with about as many rows and as long contexts took."""

    def __init__(self) -> None:
        self.without = _Mean()
        """Seconds of steps in which no row had drafts."""
        self.with_drafts = _Mean()
        """Seconds of steps in which some had."""
        self.drafts = _Mean()
        """Number of drafts in the latter."""

    def add(self, drafts: int, seconds: float) -> None:
        mean = self.with_drafts if drafts else self.without
        mean.add(min(seconds, _OUTLIER * mean.value) if mean.count >= _ENOUGH else seconds)
        if drafts:
            self.drafts.add(drafts)

    def expected(self, drafts: float) -> float:
        """Return the seconds of a step with so many drafts: each adds as much."""
        further = max(0.0, self.with_drafts.value - self.without.value)
        return max(1e-9, self.without.value + further * drafts / max(1.0, self.drafts.value))


class DepthRule:
    """The depth of the steps of one engine.

    At depth k a row yields `1 + a_1 + ... + a_k` tokens and computes `d_1 + ... + d_k` drafts, where a_j is how often a
    row's j-th draft is right, and d_j how often there is one. What a draft costs is what steps with drafts took longer
    than those without, of about as many rows with about as long contexts. The rule takes the depth with the most tokens
    a second. If that is 0, it tries drafts for a few steps now and then, so seldom that trials lose next to nothing,
    and earlier where requests are new.
    """

    def __init__(self, most: int, *, padded: bool = False) -> None:
        """Choose depths from 0 to `most`.

        Args:
            most: Largest depth.
            padded: Whether the device computes as many tokens for a row without drafts as for others.
        """
        self._most, self._padded = most, padded
        self._right = [_Mean() for _ in range(most)]
        self._there = [_Mean() for _ in range(most)]
        self._times: dict[tuple[int, int], _Times] = {}
        self._left = 0
        """Number of steps before the next choice."""
        self._pause = _HOLD
        """Number of steps at depth 0 between the latest trial and the next."""
        self._price = 0
        """Number of steps at depth 0 that pay for the latest trial, however many requests begin."""
        self._rested = 0
        """Number of steps at depth 0 since the latest trial."""
        self._rows = 1
        self._since = 0
        """Number of steps since one without drafts."""
        self._is_trial = False
        self.depth = most
        """Depth of the latest step, or of the first before there was one."""

    def choose(self, rows: int, context: int) -> int:
        """Return the depth of the next step.

        Args:
            rows: Number of rows of the step that may have drafts.
            context: Mean length of their contexts in tokens.
        """
        self._rows = rows
        if self._left <= 0:
            self._decide(self._times_of(rows, context), rows)
        self._left -= 1
        self._rested += self.depth == 0
        return self.depth

    def note_request(self) -> None:
        """Take note that a request begins, of which nothing is known: the next trial is due sooner."""
        self._pause = max(_HOLD, self._price, self._pause - self._pause // max(4, self._rows))

    def observe(self, rows: int, context: int, drafts: int, seconds: float) -> None:
        """Take in the time of a step in which no prompt was computed, with so many drafts in all rows together."""
        self._times_of(rows, context).add(drafts, seconds)
        self._since = self._since + 1 if drafts else 0

    def observe_runs(self, allowed: Sequence[int], drafted: Sequence[int], tokens: Sequence[int]) -> None:
        """Take in how many drafts the rows of a step were allowed and had, and how many tokens they yielded."""
        rows = Counter(zip(allowed, drafted, tokens, strict=False))  # few kinds, however many rows
        for place in range(self._most):
            asked = sum(count for (most, _, _), count in rows.items() if most > place)
            if asked:
                there = sum(count for (most, had, _), count in rows.items() if most > place and had > place)
                right = sum(count for (most, _, got), count in rows.items() if most > place and got > place + 1)
                self._there[place].add(there / asked)
                self._right[place].add(right / asked)

    def _decide(self, times: _Times, rows: int) -> None:
        """Choose a depth for a number of steps."""
        trial = max(_SHORTEST_TRIAL, _TRIAL // rows)
        if times.with_drafts.count < _ENOUGH and not (self._is_trial and self.depth):
            self._take(self._most, trial, is_trial=True)
        elif times.without.count < _ENOUGH or self._since >= _LONGEST_PAUSE:
            self._take(0, trial, is_trial=True)
        elif best := self._best(times, rows):
            self._take(best, _HOLD)
        elif self.depth:
            drafts = rows * sum(map(self._drafts_at, range(self._most)))
            lost = trial * (times.expected(drafts) / times.expected(0.0) - 1.0)
            unpaid = 2 * self._pause if self._is_trial else _HOLD  # trials that do not pay grow rarer
            self._price, self._rested = int(lost / _LOST), 0
            self._pause = max(self._price, min(unpaid, _LONGEST_PAUSE))
            self._take(0, _HOLD)
        elif self._rested >= self._pause:
            self._take(self._most, trial, is_trial=True)
        else:
            self._take(0, _HOLD)

    def _take(self, depth: int, steps: int, *, is_trial: bool = False) -> None:
        self.depth, self._left, self._is_trial = depth, steps, is_trial

    def _best(self, times: _Times, rows: int) -> int:
        """Return the depth with the most tokens a second; depth 0 if drafts gain next to nothing."""
        if times.with_drafts.count < _ENOUGH:
            return self._most  # there are hardly any, which cost nothing
        best, best_rate = 0, _MARGIN / times.expected(0.0)
        tokens, drafts = 1.0, 0.0
        for depth, right in enumerate(self._right, 1):
            tokens += right.value
            drafts += self._drafts_at(depth - 1)
            rate = tokens / times.expected(rows * drafts)
            if rate > best_rate:
                best, best_rate = depth, rate
        return best

    def _drafts_at(self, place: int) -> float:
        """Return how many tokens a row is expected to compute at one place behind its own."""
        return 1.0 if self._padded else self._there[place].value

    def _times_of(self, rows: int, context: int) -> _Times:
        """Return the times of steps of about as many rows and as long contexts, by powers of two."""
        return self._times.setdefault((rows.bit_length(), (context // 512).bit_length()), _Times())
