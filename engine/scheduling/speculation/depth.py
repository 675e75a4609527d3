"""`DepthRule` chooses how many drafts the rows of a step may have, by measured step times and accepted drafts.

It is pure: others tell it which depths the device has, and what steps took and yielded. Next to read: measured.py, and
counts.py, which counts for users.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

from headrace.engine.scheduling.speculation.measured import DraftRates, StepTimes

__all__ = ["DepthRule", "StepRows"]

_HOLD: Final = 32  # steps between two choices
_TRIAL: Final = 4  # rows of steps of a depth that is tried, to learn what it takes and yields
_SHORTEST_TRIAL: Final = 2  # steps
_TRIAL_DRAFTS: Final = 32  # of all rows in a step of a trial, where a depth is that small
_SURE: Final = 16  # rows with drafts from which on it is believed that hardly any are right
_LOST: Final = 0.01  # share of the time that trials may lose
_LONGEST_PAUSE: Final = 512  # steps with drafts between two probes, or at depth 0 between trials that lose little
_MARGIN: Final = 1.03  # what drafts must gain over none


class StepRows(NamedTuple):
    """Number of rows that decode in a step."""

    all: int
    drafting: int
    """Number of those that may have drafts; at least 1."""

    @property
    def share(self) -> float:
        """Share of the rows that may have drafts."""
        return self.drafting / self.all


class DepthRule:
    """The depth of the steps of one engine.

    At depth k a row yields one token and those of its first k drafts that are right up to the first wrong one, and a
    row without drafts one; what a step with so many drafts takes is measured, with about as many rows and as long
    contexts. The rule takes the depth with the most tokens a second of all rows, of those that the device has: rows
    that may have no drafts wait for those of others. If that is 0, it tries drafts for a few steps now and
    then, so seldom that trials lose next to nothing, and earlier where requests are new. The more rows there are, the
    fewer drafts a row it tries first, and none where it is known that hardly any would be right.
    """

    def __init__(self, most: int, depths: Callable[[int], Sequence[int]] | None = None) -> None:
        """Choose depths from 0 to `most`.

        Args:
            most: Largest depth.
            depths: `FixedDepths.draft_depths` of a runner that computes as many drafts for each row of a step; None if
                the runner computes those that there are, at any depth.
        """
        self._most, self._fixed = most, depths is not None
        self._depths: Callable[[int], Sequence[int]] = depths or (lambda rows: range(1, most + 1))
        self._rates = DraftRates(most)
        self._times: dict[tuple[int, int, int], StepTimes] = {}
        self._left = 0
        """Number of steps before the next choice."""
        self._pause = 0
        """Number of steps at depth 0 between the latest trial and the next."""
        self._price = 0
        """Number of steps at depth 0 that pay for the latest trial, however many requests begin."""
        self._rested = 0
        """Number of steps at depth 0 since it was last found that drafts do not pay."""
        self._unsettled = 0
        """Largest depth since then; 0 for none."""
        self._tried = 0
        """Number of steps of trials with drafts since then; 0 if drafts have paid in between."""
        self._since = 0
        """Number of steps with drafts since the latest probe."""
        self._probes = 0
        self._rows = StepRows(1, 1)
        self._is_trial = False
        self.depth = most
        """Depth of the latest step, or of the first before there was one."""

    def choose(self, rows: StepRows, context: int) -> int:
        """Return the depth of the next step.

        Args:
            rows: The rows of the step.
            context: Mean length of their contexts in tokens.
        """
        self._rows = rows
        if self._left <= 0:
            self._decide(self._times_of(rows, context), self._depths(rows.all))
        self._left -= 1
        self._rested += self.depth == 0
        self._since += self.depth > 0
        return self.depth

    def note_request(self) -> None:
        """Take note that a request begins, of which nothing is known: the next trial is due sooner."""
        sooner = self._pause - self._pause // max(4, self._rows.drafting)
        self._pause = max(self._price, min(self._pause, _HOLD), sooner)

    def observe(self, rows: StepRows, context: int, drafts: float, seconds: float) -> None:
        """Take in the time of a step in which no prompt was computed, with so many drafts a row that may have some."""
        self._times_of(rows, context).add(drafts, seconds)

    def observe_runs(self, allowed: Sequence[int], drafted: Sequence[int], tokens: Sequence[int]) -> None:
        """Take in how many drafts the rows of a step were allowed and had, and how many tokens they yielded."""
        self._rates.add(allowed, drafted, tokens)

    def _decide(self, times: StepTimes, depths: Sequence[int]) -> None:
        """Choose a depth for a number of steps."""
        steps = max(_SHORTEST_TRIAL, _TRIAL // self._rows.drafting)
        tried = self.depth if self._is_trial else 0
        could_pay = 1.0 + self._rows.share * self._most >= _MARGIN  # if all were right
        may_pay = could_pay and (self._rates.rows < _SURE or self._tokens(self._most) >= _MARGIN)
        if not depths:
            self._take(0, _HOLD)
        elif not times.most and may_pay and not tried:
            self._take(self._first(depths), steps, is_trial=True)
        elif not times.has(0) or (not times.most and may_pay and self._fixed):
            self._take(0, steps, is_trial=True)  # what the trial before it took may come to be known meanwhile
        elif self._since >= _LONGEST_PAUSE:
            self._probe(depths, steps)
        elif not times.most and self.depth and not self._fixed:
            self._take(depths[-1], _HOLD)  # there are hardly any drafts, which cost nothing
        else:
            best, unmeasured = self._best(times, depths)
            if unmeasured:
                self._take(unmeasured if unmeasured != tried else best, steps, is_trial=True)
            elif best:
                self._take(best, _HOLD)
            elif self._unsettled:
                self._settle(times, steps)
                self._take(0, _HOLD)
            elif could_pay and self._rested >= self._pause:
                self._take(self._first(depths), steps, is_trial=True)
            else:
                self._take(0, _HOLD)

    def _take(self, depth: int, steps: int, *, is_trial: bool = False) -> None:
        self.depth, self._left, self._is_trial = depth, steps, is_trial
        if depth and is_trial:
            self._unsettled, self._tried = max(self._unsettled, depth), self._tried + steps
        elif depth:
            self._unsettled, self._tried = depth, 0

    def _probe(self, depths: Sequence[int], steps: int) -> None:
        """Measure anew what steps at depth 0 take, and every other time those at one of the other depths."""
        self._since = 0
        self._probes += 1
        other = depths[self._probes // 2 % len(depths)] if self.depth == depths[-1] else depths[-1]
        self._take(0 if self._probes % 2 else other, steps, is_trial=True)

    def _settle(self, times: StepTimes, steps: int) -> None:
        """Set when drafts are tried again, which have been found not to pay."""
        lost = max(self._tried, steps) * (times.ratio(self._drafts(self._unsettled)) - 1.0)
        unpaid = 2 * self._pause if self._tried else 0  # trials that do not pay grow rarer
        self._price = int(lost / _LOST)
        self._pause = max(_HOLD, self._price, min(unpaid, _LONGEST_PAUSE))
        self._rested = self._tried = self._unsettled = 0

    def _first(self, depths: Sequence[int]) -> int:
        """Return the depth to try where it is not known what drafts take: little is lost if they do not pay.

        A larger one is tried where drafts pay even if each takes half as long as a row's own token.
        """
        is_sure = self._rates.rows >= _SURE
        rows = self._rows.all if self._fixed else self._rows.drafting  # that have drafts to compute
        longer = rows / self._rows.all / 2  # by each draft
        return max(
            (
                depth
                for depth in depths
                if rows * depth <= _TRIAL_DRAFTS or (is_sure and self._tokens(depth) >= 1.0 + depth * longer)
            ),
            default=depths[0],
        )

    def _best(self, times: StepTimes, depths: Sequence[int]) -> tuple[int, int]:
        """Return the depth with the most tokens a second, 0 if drafts gain next to nothing; and one to measure first.

        The latter is the smallest whose steps were not measured, and that would be best if they took no longer than
        those of the next smaller depth that was; 0 for none.
        """
        best, best_gain = 0, _MARGIN
        if not times.most:
            return 0, 0
        tokens = {depth: self._tokens(depth) for depth in depths}
        for depth in depths:
            gain = tokens[depth] / times.ratio(self._drafts(depth))
            if gain > best_gain:
                best, best_gain = depth, gain
        unmeasured = (depth for depth in depths if self._fixed and not times.has(depth))
        hopes = (depth for depth in unmeasured if tokens[depth] / times.ratio_before(depth) > _MARGIN * best_gain)
        return best, next(hopes, 0)

    def _tokens(self, depth: int) -> float:
        """Return how many tokens a row, whether or not it may have drafts, is expected to yield at a depth."""
        return 1.0 + self._rows.share * (self._rates.tokens(depth) - 1.0)

    def _drafts(self, depth: int) -> float:
        """Return how many drafts a row that may have some is expected to compute at a depth."""
        return depth if self._fixed else self._rates.drafts(depth)

    def _times_of(self, rows: StepRows, context: int) -> StepTimes:
        """Return the times of steps of about as many rows and as long contexts, by powers of two."""
        drafting = 0 if self._fixed else rows.drafting  # where the depth is fixed, each row computes its drafts
        key = rows.all.bit_length(), drafting.bit_length(), (context // 512).bit_length()
        return self._times.setdefault(key, StepTimes())
