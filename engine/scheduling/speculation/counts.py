"""`Speculation`: the depth of an engine's steps and the counts of its drafts; plans and verifies none itself."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Protocol, runtime_checkable

from headrace.engine.scheduling.plan import StepPlan
from headrace.engine.scheduling.request import Request
from headrace.engine.scheduling.result import StepResult
from headrace.engine.scheduling.speculation.depth import DepthRule, StepRows

__all__ = ["FixedDepths", "Speculation"]


@runtime_checkable
class FixedDepths(Protocol):
    """A runner that computes as many drafts for each row of a step, in one of a few depths, as graphs on a GPU do."""

    def draft_depths(self, rows: int) -> Sequence[int]:
        """Return the depths that steps of `rows` decodes have if they verify drafts, in rising order.

        A step runs at the smallest that has room for the most drafts of its rows, or at the largest if none has.
        """
        ...


class Speculation:
    """How deep the steps of one engine speculate, and what came of it."""

    def __init__(
        self,
        most: int,
        choose: Callable[[StepRows, int], int] | None = None,
        *,
        depths: Callable[[int], Sequence[int]] | None = None,
    ) -> None:
        """Begin without counts.

        Args:
            most: Most drafts of a row in one step.
            choose: Takes the place of `DepthRule.choose`, for tests.
            depths: `FixedDepths.draft_depths` of the runner; None if it computes the drafts that there are.
        """
        self._most, self._depths = most, depths
        self.rule = DepthRule(most, depths)
        self.runs = 0
        """Number of rows of steps that verified drafts."""
        self.drafted = 0
        self.accepted = 0
        self.drafted_at = [0] * most
        """Number of verified drafts by their position behind a row's own token."""
        self.accepted_at = [0] * most
        """Number of accepted drafts by the same position."""
        self.latest = 0
        """Depth of the latest step with decodes; 0 before there was one."""
        self._choose = choose or self.rule.choose

    def depth(self, running: Sequence[Request], most_tokens: int) -> int:
        """Return the depth of a step with the decodes of `running`, which leaves half of `most_tokens` to prompts."""
        if running:
            self.latest = self._depth(running, most_tokens)
            return self.latest
        return 0

    def room(self, rows: int, most_tokens: int) -> int:
        """Return the most drafts of each row in a step of up to `most_tokens`, if all of its `rows` rows speculate."""
        most = self._most if self._depths is None else max(self._depths(rows), default=0)
        return self._within(most, rows, rows, most_tokens)

    def _depth(self, running: Sequence[Request], most_tokens: int) -> int:
        rows = _counted(running)
        if not rows.drafting:
            return 0
        depth = self._choose(rows, sum([request.planned for request in running]) // rows.all)
        return self._within(depth, rows.all, rows.drafting, most_tokens)

    def _within(self, depth: int, rows: int, speculating: int, most_tokens: int) -> int:
        """Return `depth`, or the largest below it with which half of what `rows` decodes leave is for prompts."""
        fits = (most_tokens - rows) // (2 * speculating)
        if depth <= fits or self._depths is None:
            return max(0, min(depth, fits))
        return max((each for each in self._depths(rows) if each <= fits), default=0)

    def observe(self, plan: StepPlan, result: StepResult, seconds: float) -> None:
        """Take in a step that has ended and took `seconds`.

        What it took to read late is no part of the time of its depth: at any depth it would have been due soon.
        """
        if plan.depth:
            counts = result.counts or [1] * plan.size
            drafted = result.drafted or [0] * len(plan.drafts)
            self.rule.observe_runs(plan.drafts, drafted, counts)
            for (drafts, count), alike in Counter(zip(drafted, counts, strict=False)).items():
                if drafts:
                    self.runs += alike
                    self.drafted += drafts * alike
                    self.accepted += (count - 1) * alike
                    for place in range(drafts):
                        self.drafted_at[place] += alike
                    for place in range(count - 1):
                        self.accepted_at[place] += alike
        rows = _counted(plan.decodes)
        if rows.drafting and not plan.others:
            drafts_of_row = self._drafts_of_row(plan, result, rows.drafting)
            seconds = max(0.0, seconds - result.late_seconds)
            self.rule.observe(rows, sum(plan.starts) // rows.all, drafts_of_row, seconds)

    def _drafts_of_row(self, plan: StepPlan, result: StepResult, rows: int) -> float:
        """Return how many drafts a step of decodes, `rows` of which speculate, has computed for each of these."""
        if self._depths is None or not result.drafted:
            return sum(result.drafted) / rows
        depths = self._depths(len(plan.decodes))
        return depths[min(bisect_left(depths, max(plan.drafts)), len(depths) - 1)]


def _counted(decodes: Sequence[Request]) -> StepRows:
    return StepRows(len(decodes), sum([request.asked.speculates for request in decodes]))
