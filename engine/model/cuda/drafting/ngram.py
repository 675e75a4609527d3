"""`NgramDrafts`: guesses on a GPU by the row's own tokens alone, in one kernel of every step with drafts."""

from __future__ import annotations

from torch import Tensor

from headrace.engine.model.cuda.drafting.drafter import Decoded, Prefilled, RowTable
from headrace.ops.cuda.drafts.ngram import guess_by_ngrams

__all__ = ["NgramDrafts"]


class NgramDrafts:
    """Guesses that a row goes on as it did the last time that it held its latest tokens."""

    taps = None

    def __init__(self, table: RowTable, longest: int) -> None:
        """Compare up to `longest` of the last tokens of each row of `table`, and at least two."""
        self._table, self._longest = table, longest

    def draft(self, rows_B: Tensor, depth: int, counts_B: Tensor) -> None:
        """Enqueue the drafts of a step."""
        table = self._table
        guess_by_ngrams(rows_B, table.pool_RC, table.lengths_R, counts_B, depth=depth, longest=self._longest)

    def take_up(self, decoded: Decoded) -> None:
        """Do nothing: the row table has all that is needed."""

    def take_up_prompts(self, prefilled: Prefilled) -> None:
        """Do nothing: the row table has all that is needed."""
