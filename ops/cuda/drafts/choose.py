"""Chooses drafts on CUDA by the noise with which their target will choose, and puts them behind their rows' tokens.

Where both are drawn with the same noise, a draft is right far more often than the likeliest token would be (Daliri,
Musco and Suresh, 2024). Runs no model, and verifies nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import triton
import triton.language as tl

from headrace.ops.cuda.sampling.sample import score_tokens

if TYPE_CHECKING:
    from torch import Tensor

    from headrace.ops.cuda.sampling.sample import Asks, SampleScratch

__all__ = ["choose_drafts"]


# fmt: off
@triton.jit
def _draft_kernel(
    scores, ids, rows, counts, positions, pool, out, pool_stride, parts, context,
    PARTS: tl.constexpr,
):
    at_row = tl.program_id(0)
    row = tl.load(rows + at_row).to(tl.int64)
    part = tl.arange(0, PARTS)
    score = tl.load(scores + at_row * parts + part, mask=part < parts, other=float("-inf"))
    token = tl.load(ids + at_row * parts + part, mask=part < parts, other=2147483647)
    chosen = tl.min(tl.where(score == tl.max(score, axis=0), token, 2147483647), axis=0)
    position = tl.load(positions + at_row) + 1
    has_drafts = tl.load(counts + at_row) > 0
    tl.store(out + at_row, chosen)
    tl.store(positions + at_row, position)
    tl.store(pool + row * pool_stride + position, chosen, mask=has_drafts & (position < context))


# fmt: on
def choose_drafts(
    logits_BD: Tensor,
    rows_B: Tensor,
    positions_B: Tensor,
    counts_B: Tensor,
    asks: Asks,
    pool_RC: Tensor,
    out_ids_B: Tensor,
    scratch: SampleScratch,
    *,
    ids_D: Tensor | None = None,
) -> None:
    """Choose a draft for each row, by temperature and noise alone, and put it behind the tokens of rows with drafts.

    Args:
        logits_BD: Logits of the tokens `ids_D`, bf16, fp16 or fp32, last dimension contiguous.
        rows_B: Row numbers, int32.
        positions_B: Position of the token before each draft, int32; becomes that of the draft.
        counts_B: Number of drafts of each row, int32; nothing is put behind rows without any.
        asks: What the rows ask of the choice; filters are not looked at.
        pool_RC: Tokens of each row, int32.
        out_ids_B: Output: the drafts, int32; any token where logits are not finite.
        scratch: Scratch for at least this many rows and logits.
        ids_D: Token id of each logit, int64; None if they are 0 to D - 1.
    """
    parts = score_tokens(logits_BD, rows_B, positions_B, asks, scratch, filtered=False, ids_D=ids_D)
    _draft_kernel[(len(rows_B),)](
        scratch.scores_BS, scratch.ids_BS, rows_B, counts_B, positions_B, pool_RC, out_ids_B, pool_RC.stride(0), parts,
        pool_RC.shape[1], PARTS=triton.next_power_of_2(parts), num_warps=1,
    )  # fmt: skip
