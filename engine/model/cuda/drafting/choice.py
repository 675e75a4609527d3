"""`DraftChoice`: chooses the drafts of a step, one place of all rows after the other, as the rows choose their tokens.

Owns the tensors between the kernels of the choice. Next to read: ops/cuda/drafts/choose.py.
"""

from __future__ import annotations

import torch
from torch import Tensor

from headrace.engine.model.cuda.drafting.drafter import RowTable
from headrace.ops.cuda.drafts.choose import choose_drafts
from headrace.ops.cuda.sampling.sample import SampleScratch

__all__ = ["DraftChoice"]


class DraftChoice:
    """Chooses drafts for the rows of one table."""

    def __init__(self, rows: RowTable, tokens: int, ids_D: Tensor | None = None) -> None:
        """Allocate for the largest step.

        Args:
            rows: The row table.
            tokens: Number of tokens that may be chosen.
            ids_D: Their ids, int64; None if they are 0 to `tokens` - 1.
        """
        size, device = len(rows.lengths_R) - 1, rows.lengths_R.device
        self._rows, self._ids_D = rows, ids_D
        self._scratch = SampleScratch(size, tokens, device, filters=False)
        self._positions = torch.zeros(size, dtype=torch.int32, device=device)
        self._ids = torch.zeros_like(self._positions)

    def begin(self, rows_B: Tensor) -> None:
        """Enqueue the beginning of a step of rows (int32): the next drafts are those behind their known tokens."""
        torch.index_select(self._rows.lengths_R, 0, rows_B, out=self._positions[: len(rows_B)])

    def choose(self, logits_BD: Tensor, rows_B: Tensor, counts_B: Tensor) -> Tensor:
        """Enqueue the choice of the next draft of each row; return the ids, int32, in memory that is used again.

        Args:
            logits_BD: Logits of the tokens that may be chosen.
            rows_B: Row numbers, int32, as `begin` got them.
            counts_B: Number of drafts of each row, int32; the drafts of rows without any are not kept.
        """
        rows, count = self._rows, len(rows_B)
        ids_B = self._ids[:count]
        choose_drafts(
            logits_BD, rows_B, self._positions[:count], counts_B, rows.asks, rows.pool_RC, ids_B, self._scratch,
            ids_D=self._ids_D,
        )  # fmt: skip
        return ids_B
