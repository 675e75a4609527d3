"""`LateRows`: the rows of a device that were left without a token, since their grammar's mask was not there in time.

Owns these rows' positions and the time that a step waits for masks; never finds a mask. Such a row is skipped until a
plan shows that the scheduler knows: plans that were launched before assume the token that was not chosen.
"""

from __future__ import annotations

import math
from typing import Final

from headrace.engine.scheduling.plan import GivenTokens, StepPlan

__all__ = ["LateRows"]

_PATIENCE: Final = 0.01  # seconds, where all rows have grammars; a request that arrives meanwhile waits, too


class LateRows:
    """The late rows of one runner."""

    def __init__(self) -> None:
        """Start without rows."""
        self._places: dict[int, int] = {}
        """Position of the token that was not chosen, by row."""

    def __bool__(self) -> bool:
        return bool(self._places)

    def __contains__(self, row: int) -> bool:
        return row in self._places

    def take(self, plan: StepPlan) -> list[GivenTokens]:
        """Forget rows that change hands or go on; return the given tokens, except for rows not yet known to be late."""
        if not self._places:
            return plan.given
        for row in (*plan.left_rows, *(new.row for new in plan.new_rows)):
            self._places.pop(row, None)
        given = [each for each in plan.given if self._places.get(each.row, each.start) == each.start]
        for each in given:
            self._places.pop(each.row, None)
        return given

    def hold(self, row: int, place: int) -> None:
        """Mark `row` as late: its token at position `place` was not chosen."""
        self._places[row] = place

    @staticmethod
    def patience(plan: StepPlan, *, others: bool) -> float:
        """Return the seconds that the step of `plan` waits for masks once its logits are there.

        Args:
            plan: A plan with at least one row that has a grammar.
            others: Whether the plan has rows without grammars, which must not wait.
        """
        if plan.alone:  # a late row would be computed again in another way
            return math.inf
        return 0.0 if others else _PATIENCE
