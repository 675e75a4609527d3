"""What was measured of drafts: `StepTimes`, how long steps took, and `DraftRates`, how often drafts were right.

Both forget slowly. Neither chooses anything. Next to read: depth.py, which does.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Sequence
from math import ceil, sqrt
from typing import Final

__all__ = ["DraftRates", "StepTimes"]

_ENOUGH: Final = 2  # measurements from which a mean is believed
_KEEP: Final = 0.97  # weight of the old mean at each measurement
_OUTLIER: Final = 3.0  # times the mean: a step that was held up counts as no longer than this


class _Mean:
    """A mean that forgets slowly, and begins as the plain mean of what there is."""

    def __init__(self) -> None:
        self.value = 0.0
        self.count = 0

    def add(self, value: float, weight: float = 1.0) -> None:
        """Take in a value that makes older ones as small a part of the mean as so many usual values would."""
        self.count += 1
        self.value += (value - self.value) * max(1.0 / self.count, 1.0 - _KEEP**weight)


class _Share:
    """The share of rows of which something is so, by steps, of which some measure nothing."""

    def __init__(self) -> None:
        self.mean = _Mean()
        self._missed = 0
        """Number of steps since the latest that measured something."""

    def add(self, count: int, rows: int) -> None:
        """Take in a step in which it was so for `count` of `rows`; the more rows, the surer it is."""
        self._missed += 1
        if rows:
            self.mean.add(count / rows, self._missed * sqrt(rows))
            self._missed = 0


class _Level:
    """What steps with about as many drafts a row took."""

    def __init__(self) -> None:
        self.drafts = _Mean()
        """Number of drafts a row."""
        self.seconds = _Mean()


class StepTimes:
    """What steps with about as many rows and as long contexts took, by their number of drafts a row."""

    def __init__(self) -> None:
        """Begin without measurements."""
        self._levels: dict[int, _Level] = {}
        """Means by the number of drafts a row, rounded up."""
        self._believed: list[int] = []
        """Keys of the levels that were measured often enough, in rising order."""

    @property
    def most(self) -> int:
        """Most drafts a row, rounded up, with which steps were measured; 0 if with none."""
        return self._believed[-1] if self._believed else 0

    def has(self, drafts: int) -> bool:
        """Return whether steps with so many drafts a row, rounded up, were measured."""
        return drafts in self._believed

    def add(self, drafts: float, seconds: float) -> None:
        """Take in the time of a step with so many drafts a row."""
        number = ceil(drafts)
        level = self._levels.setdefault(number, _Level())
        mean = level.seconds
        mean.add(min(seconds, _OUTLIER * mean.value) if mean.count >= _ENOUGH else seconds)
        level.drafts.add(drafts)
        if mean.count == _ENOUGH:
            insort(self._believed, number)

    def ratio_before(self, drafts: int) -> float:
        """Return the ratio of the most drafts a row, fewer than so many, with which steps were measured."""
        number = self._believed[bisect_left(self._believed, drafts) - 1]
        return self.ratio(self._levels[number].drafts.value)

    def ratio(self, drafts: float) -> float:
        """Return how many times as long as one without drafts a step with so many drafts a row takes, at least 1.

        Where such steps were not measured, each further draft is taken to add as much: between two that were, and
        behind the last one, where it adds what the drafts up to there add on average. Steps without drafts must have
        been measured.
        """
        base = max(1e-9, self._levels[0].seconds.value)
        before, ratio = 0.0, 1.0
        for number in self._believed[1:]:
            level = self._levels[number]
            here, there = level.drafts.value, max(1.0, level.seconds.value / base)
            if drafts < here:
                return ratio + (there - ratio) * (drafts - before) / (here - before)
            before, ratio = here, there
        return ratio if not before else 1.0 + (ratio - 1.0) * drafts / before


class DraftRates:
    """How often rows had drafts, and how often these were right, by their place behind a row's own token."""

    def __init__(self, most: int) -> None:
        """Begin without measurements of `most` places."""
        self.rows = 0
        """Number of rows that were allowed drafts."""
        self._there = [_Share() for _ in range(most)]
        """Shares of rows that had a draft at a place, of those that were allowed one."""
        self._right = [_Share() for _ in range(most)]
        """Shares of rows whose draft at a place was right, of those that were allowed one and all before it were."""

    def add(self, allowed: Sequence[int], drafted: Sequence[int], tokens: Sequence[int]) -> None:
        """Take in how many drafts the rows of a step were allowed and had, and how many tokens they yielded."""
        rows = Counter(zip(allowed, drafted, tokens, strict=False))  # few kinds, however many rows
        self.rows += sum(count for (most, _, _), count in rows.items() if most)
        for place, (there, right) in enumerate(zip(self._there, self._right, strict=True)):
            asked = [(had, got, count) for (most, had, got), count in rows.items() if most > place]
            going = [(got, count) for _, got, count in asked if got > place]
            there.add(sum(count for had, _, count in asked if had > place), sum(count for _, _, count in asked))
            right.add(sum(count for got, count in going if got > place + 1), sum(count for _, count in going))

    def drafts(self, depth: int) -> float:
        """Return how many drafts a row is expected to have at a depth."""
        total = share = 0.0
        for there in self._there[:depth]:
            share = there.mean.value if there.mean.count else share
            total += share
        return total

    def tokens(self, depth: int) -> float:
        """Return how many tokens a row is expected to yield at a depth.

        Where drafts of a place were not measured, they are right as often as those before them.
        """
        total, chance, share = 1.0, 1.0, 0.0
        for place, right in enumerate(self._right[:depth]):
            share = right.mean.value if right.mean.count else share
            chance *= share
            total += chance
            if not place and share:  # of the rows that had a first draft: only these go on
                share /= self._there[0].mean.value
        return total
