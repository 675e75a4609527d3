"""Derives the inputs of a decode step in which rows compute drafts, on CUDA; never attends, and never chooses tokens.

A step of depth k over B rows has L = B * (k + 1) lines: line (b, j) is the token j places behind the last known one of
row b. To everything between embedding and logits, a line is a row of a batch like any other.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import triton
import triton.language as tl

if TYPE_CHECKING:
    from torch import Tensor

    from headrace.ops.cuda.fused import DecodeInputs

__all__ = ["prepare_lines"]

_COPY_BLOCK = 1024


# fmt: off
@triton.jit
def _prepare_lines_kernel(
    rows, counts, most, pool, lengths, table, line_rows, tokens, positions, slots, seq_lens, pages, tails,
    pool_stride, table_stride, columns, context, padding_row,
    LINES: tl.constexpr, PAGE: tl.constexpr, BLOCK: tl.constexpr,
):
    at = tl.program_id(0)
    block = tl.program_id(1)
    ahead = at % LINES
    row = tl.load(rows + at // LINES)
    drafts = tl.minimum(tl.load(counts + at // LINES), tl.load(most + row))
    start = tl.load(lengths + row)
    there = (ahead == 0) | ((ahead <= drafts) & (row != padding_row) & (start + ahead < context))
    row = tl.where(there, row, padding_row).to(tl.int64)
    position = tl.minimum(tl.where(there, start + ahead, 0), context - 1)
    if block == 0:
        page = tl.load(table + row * table_stride + position // PAGE).to(tl.int64)
        tl.store(line_rows + at, row.to(tl.int32))
        tl.store(tokens + at, tl.load(pool + row * pool_stride + position))
        tl.store(positions + at, position)
        tl.store(slots + at, page * PAGE + position % PAGE)
        tl.store(seq_lens + at, position + 1)
        tl.store(tails + at, position + 1 - (columns - 1) * PAGE)
    if block * BLOCK * PAGE <= position:
        column = block * BLOCK + tl.arange(0, BLOCK)
        used = (column < columns) & (column * PAGE <= position)
        numbers = tl.load(table + row * table_stride + column, mask=used, other=0)
        tl.store(pages + at.to(tl.int64) * columns + column, numbers, mask=used)


# fmt: on
def prepare_lines(
    rows_B: Tensor,
    counts_B: Tensor,
    most_R: Tensor,
    pool_RC: Tensor,
    lengths_R: Tensor,
    table_RP: Tensor,
    line_rows_L: Tensor,
    out: DecodeInputs,
    *,
    depth: int,
    page_size: int,
) -> None:
    """Derive the inputs of a step of B * (depth + 1) lines from the state on the device.

    Args:
        rows_B: Row numbers, int32; the last row of `pool_RC` is padding, whose length stays 0.
        counts_B: Number of drafts of each row of the batch, int32.
        most_R: Largest number of drafts that each row may compute, int32.
        pool_RC: Tokens of each row, int32, drafts behind those that are known.
        lengths_R: Number of tokens of each row whose keys and values are written, int32.
        table_RP: Page numbers of each row, int32.
        line_rows_L: Output: the row of each line, int32; the padding row for lines without a draft.
        out: Inputs to write, of as many rows as there are lines.
        depth: Largest number of drafts of a row.
        page_size: Tokens in a page.
    """
    columns, lines = out.pages_BP.shape[1], depth + 1
    _prepare_lines_kernel[(len(rows_B) * lines, triton.cdiv(columns, _COPY_BLOCK))](
        rows_B, counts_B, most_R, pool_RC, lengths_R, table_RP, line_rows_L, out.tokens_B, out.positions_B,
        out.slots_B, out.seq_lens_B, out.pages_BP, out.tails_B, pool_RC.stride(0), table_RP.stride(0), columns,
        columns * page_size, pool_RC.shape[0] - 1,
        LINES=lines, PAGE=page_size, BLOCK=min(_COPY_BLOCK, triton.next_power_of_2(columns)), num_warps=4,
    )  # fmt: skip
