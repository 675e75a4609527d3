"""Guesses on CUDA that a row goes on as it did the last time that it held its latest tokens; has no state.

The drafts are those of engine/model/drafting/ngram.py (prompt lookup decoding, Saxena, 2023).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import triton
import triton.language as tl

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["guess_by_ngrams"]

_BLOCK = 2048
_SHORTEST = 2
_PLACES = 1 << 25
"""More than there are positions: the length of a match stands above its place in one word."""


# fmt: off
@triton.jit
def _ngram_kernel(
    rows, pool, lengths, counts, stride, context, padding_row,
    DEPTH: tl.constexpr, SLOTS: tl.constexpr, LONGEST: tl.constexpr, SHORTEST: tl.constexpr, PLACES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    at = tl.program_id(0)
    row = tl.load(rows + at)
    line = pool + row.to(tl.int64) * stride
    end = tl.load(lengths + row) + 1
    best = tl.zeros([BLOCK], tl.int32)
    for start in range(0, end - 1, BLOCK):
        place = start + tl.arange(0, BLOCK)
        equal = place < end - 1
        count = tl.zeros([BLOCK], tl.int32)
        for back in range(LONGEST):
            if (tl.max(equal.to(tl.int32), axis=0) > 0) & (back < end):
                wanted = tl.load(line + end - 1 - back)
                equal = equal & (place >= back)
                equal = equal & (tl.load(line + place - back, mask=equal, other=-1) == wanted)
                count += equal.to(tl.int32)
        best = tl.maximum(best, count * PLACES + place)
    found = tl.max(best, axis=0)
    many = (found >= SHORTEST * PLACES) & (row != padding_row)
    found = found % PLACES
    period = tl.maximum(end - 1 - found, 1)
    ahead = tl.arange(0, SLOTS)
    inside = many & (ahead < DEPTH) & (end + ahead < context)
    drafts = tl.load(line + found + 1 + ahead % period, mask=inside, other=0)
    tl.store(line + end + ahead, drafts, mask=inside)
    tl.store(counts + at, tl.where(many, DEPTH, 0))


# fmt: on
def guess_by_ngrams(
    rows_B: Tensor, pool_RC: Tensor, lengths_R: Tensor, counts_B: Tensor, *, depth: int, longest: int
) -> None:
    """Put drafts behind the known tokens of each row that held its last tokens before.

    Args:
        rows_B: Row numbers, int32; the last row of `pool_RC` is padding, which gets none.
        pool_RC: Tokens of each row, int32.
        lengths_R: Position of each row's last known token, int32.
        counts_B: Output: number of drafts of each row, int32, `depth` or 0.
        depth: Number of drafts.
        longest: Most of the last tokens that are compared, up to 32; at least two must be equal.
    """
    rows, context = pool_RC.shape
    _ngram_kernel[(len(rows_B),)](
        rows_B, pool_RC, lengths_R, counts_B, pool_RC.stride(0), context, rows - 1,
        DEPTH=depth, SLOTS=triton.next_power_of_2(depth), LONGEST=longest, SHORTEST=_SHORTEST, PLACES=_PLACES,
        BLOCK=_BLOCK, num_warps=8,
    )  # fmt: skip
