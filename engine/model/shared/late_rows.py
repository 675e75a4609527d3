"""`LateRows`: which rows of a device were left without a token, since the mask of their grammar was not there in time.

Owns their places and when a step may go on without them; never finds a mask. Such a row is left alone until a plan says
that its scheduler knows: plans that were launched before count on the token that was not chosen.
"""

from __future__ import annotations

import math
from typing import Final

from headrace.engine.scheduling.plan import GivenTokens, StepPlan

__all__ = ["LateRows"]

_PATIENCE: Final = 0.01  # where all rows keep to grammars; whoever arrives meanwhile waits as well


class LateRows:
    """The late rows of one runner."""

    def __init__(self) -> None:
        """Start with none."""
        self._places: dict[int, int] = {}
        """Row -> the position of the token that was not chosen."""

    def __bool__(self) -> bool:
        return bool(self._places)

    def __contains__(self, row: int) -> bool:
        return row in self._places

    def take(self, plan: StepPlan) -> list[GivenTokens]:
        """Forget rows that change hands or go on; what `plan` gives, but for rows that it does not know to be late."""
        if not self._places:
            return plan.given
        for row in (*plan.left_rows, *(new.row for new in plan.new_rows)):
            self._places.pop(row, None)
        given = [each for each in plan.given if self._places.get(each.row, each.start) == each.start]
        for each in given:
            self._places.pop(each.row, None)
        return given

    def hold(self, row: int, place: int) -> None:
        """Leave `row` alone, whose token at `place` was not chosen."""
        self._places[row] = place

    @staticmethod
    def patience(plan: StepPlan, *, others: bool) -> float:
        """Seconds after its logits for which the step of `plan` waits for masks.

        Args:
            plan: One whose rows, or some of them, keep to a grammar.
            others: Whether some do not, and wait for nobody.
        """
        if plan.alone:  # its row would be computed again in another way
            return math.inf
        return 0.0 if others else _PATIENCE
