"""`UnreadLines` finds on the device what a drafter has not read of its rows, and `KeptStates` keeps what it reads then.

A step without drafts only stores what the drafter will need of it. Before it is asked, or when it would be too far
behind, one pass reads the latest `LAG` positions of each row, or those of them that it has not read, as the lines of a
batch: line (b, j), in row-major order, is row b's j-th unread position, and lines that are none are of the padding row.
Neither knows what is read how. Next to read: catching_up.py, which says when.
"""

from __future__ import annotations

from typing import Final, NamedTuple

import torch
from torch import Tensor

from headrace.engine.model.cuda.drafting.drafter import Decoded, RowTable
from headrace.engine.model.cuda.drafting.inputs import LineInputs
from headrace.engine.model.network.decoder import HiddenStates
from headrace.ops.cuda.drafts.keep import keep_states
from headrace.ops.cuda.drafts.lines import prepare_lines
from headrace.ops.cuda.fused import DecodeInputs

__all__ = ["LAG", "MOST_ROWS", "KeptStates", "UnreadBatch", "UnreadLines"]

LAG: Final = 16
"""Number of a row's latest positions that may be unread: one pass for so many tokens costs little for each."""
MOST_ROWS: Final = 64
"""Most rows that are read in one pass: beyond a thousand lines, a pass takes as long as its multiplications."""


class UnreadBatch(NamedTuple):
    """What a drafter has to read of B rows: `LAG` lines for each."""

    inputs: DecodeInputs
    """Inputs of the lines: tokens, positions, places of keys and values, pages."""
    line_rows_L: Tensor
    """Row of each line, int32; the padding row for lines that are not to be read."""
    rows_B: Tensor
    """Row numbers, int64; the padding row for rows of which all is read."""
    ends_B: Tensor
    """Position behind the last line of each row, int32; arbitrary for padding."""
    last_B: Tensor
    """Index of the last line of each row, int64."""


class UnreadLines:
    """Lays out what a drafter has not read of the rows of one table."""

    def __init__(self, rows: RowTable, page_size: int, context: int | None = None) -> None:
        """Allocate for the largest pass.

        Args:
            rows: The row table.
            page_size: Tokens in a page.
            context: Number of positions of a row that the drafter can read; None for all.
        """
        self._rows, self._page_size, self._context = rows, page_size, context
        self._padding_row: Final = len(rows.lengths_R) - 1
        lines, device = min(MOST_ROWS, self._padding_row) * LAG, rows.lengths_R.device
        self._inputs = LineInputs(rows.table_RP, lines)
        self._line_rows = torch.zeros(lines, dtype=torch.int32, device=device)
        self._firsts = torch.arange(0, lines, LAG, device=device)
        self._lag_R = torch.full_like(rows.lengths_R, LAG)

    def of(self, rows_B: Tensor) -> UnreadBatch:
        """Enqueue the layout of what is unread of some rows, int32; the padding row may come more than once.

        What it returns lies in memory that the next call uses again.
        """
        rows, count = self._rows, len(rows_B)
        ends_R = rows.lengths_R if self._context is None else rows.lengths_R.clamp(max=self._context)
        starts_R = torch.minimum(torch.maximum(rows.read_R, ends_R - LAG), ends_R).clamp(min=0)
        places_B = rows_B.long()
        ends_B = ends_R[places_B]
        counts_B = ends_B - starts_R[places_B]
        reading_B = torch.where(counts_B > 0, rows_B, self._padding_row).int()
        inputs, line_rows_L = self._inputs.of(count * LAG), self._line_rows[: count * LAG]
        prepare_lines(
            reading_B, counts_B - 1, self._lag_R, rows.pool_RC, starts_R, rows.table_RP, line_rows_L, inputs,
            depth=LAG - 1, page_size=self._page_size,
        )  # fmt: skip
        last_B = self._firsts[:count] + (counts_B - 1).clamp(min=0)
        return UnreadBatch(inputs, line_rows_L, reading_B.long(), ends_B, last_B)


class KeptStates:
    """The target's states of the latest `LAG` positions of each row, as far as steps without drafts computed them."""

    def __init__(self, rows: RowTable, taps: int, size: int, dtype: torch.dtype) -> None:
        """Keep the inputs of `taps` layers, or the final state if that is 0, of `size` elements each."""
        self._taps = taps
        shape = max(1, taps), len(rows.lengths_R), LAG, size
        self._ring_TRWE = torch.zeros(shape, dtype=dtype, device=rows.lengths_R.device)

    def keep(self, decoded: Decoded) -> None:
        """Enqueue that the states of a step without drafts are kept."""
        states = decoded.states.inputs if self._taps else (decoded.states.final_NE,)
        for states_BE, ring_RWE in zip(states, self._ring_TRWE, strict=True):
            keep_states(states_BE, decoded.rows_B, decoded.inputs.positions_B, ring_RWE)

    def of(self, unread: UnreadBatch) -> HiddenStates:
        """Return the states of lines; of positions that are not among the latest, those of others."""
        places_L = unread.line_rows_L.long() * LAG + unread.inputs.positions_B % LAG
        kept = tuple(ring_RWE.flatten(0, 1)[places_L] for ring_RWE in self._ring_TRWE)
        return HiddenStates(kept[-1], kept if self._taps else ())  # where there are taps, heads read nothing else
