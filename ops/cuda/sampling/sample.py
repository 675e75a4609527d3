"""Chooses next tokens from logits on CUDA; has no state: noise comes from (seed, position, token id) only.

A sampled token is the largest `logit / temperature + Gumbel noise` (Gumbel-max), so it depends on its own row's logits
and parameters, and not on the batch, the row's place in it or how the work is divided: a maximum is exact. Top-k, top-p
and min-p come first as one threshold on the logits (filter.py), found only for the rows that ask.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from headrace.ops.cuda.sampling.filter import FilterScratch, find_least

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["NON_FINITE", "Asks", "SampleScratch", "sample", "score_tokens"]

NON_FINITE = -1

# One program's share of a row. It is part of the noise's definition: a change changes the tokens of a seed.
_BLOCK = 4096


class Asks(NamedTuple):
    """What rows ask of a choice; tensors over all rows of a table."""

    temperature_R: Tensor
    """Temperatures, float32; 0 takes the largest logit, the first of equals."""
    top_k_R: Tensor
    """Top-k, int32; 0 for all."""
    top_p_R: Tensor
    """Top-p, float32; 1 for all. It applies to what top-k leaves; equal logits stay together."""
    min_p_R: Tensor
    """Min-p, float32; 0 for all. It is relative to the largest probability."""
    seed_R: Tensor
    """Seeds, int64."""


class SampleScratch:
    """Device memory that `sample` uses between its kernels, for up to `rows` rows of `vocabulary` logits.

    Args:
        rows: Most rows of a call.
        vocabulary: Number of logits of a row.
        device: The GPU.
        dtype: Dtype of the logits.
        filters: Whether to allocate the 128 KB for each row (256 KB for float32) that top-k and top-p need.
        filter_rows: Rows that thresholds are found for at once, one part of the rows after the other; None for all.
    """

    def __init__(
        self,
        rows: int,
        vocabulary: int,
        device: torch.device | str,
        *,
        dtype: torch.dtype = torch.bfloat16,
        filters: bool = True,
        filter_rows: int | None = None,
    ) -> None:
        parts = triton.cdiv(vocabulary, _BLOCK)
        self.scores_BS = torch.empty(rows, parts, dtype=torch.float32, device=device)
        self.ids_BS = torch.empty(rows, parts, dtype=torch.int32, device=device)
        self.least_B = torch.empty(rows, dtype=torch.float32, device=device)
        self.filter_rows = min(rows, filter_rows or rows)
        self.filter = FilterScratch(self.filter_rows, vocabulary, device, dtype) if filters else None


@triton.jit
def _noise(bits):
    """Return -log(E) for exponential E, Gumbel noise from 32 random bits; exact for small E, since these win."""
    part = tl.minimum((bits.to(tl.float32) + 0.5) * 2.3283064365386963e-10, 0.99999994)
    waited = tl.where(part < 0.01, part * (1.0 + part * (0.5 + part * (1.0 / 3.0))), -tl.log(1.0 - part))
    return -tl.log(waited)


@triton.jit
def _word(key, position, token, QUARTER: tl.constexpr):
    """Return the random word of each token at a position."""
    zero = tl.zeros(token.shape, tl.uint32)
    counter = (token // (4 * QUARTER) * QUARTER + token % QUARTER).to(tl.uint32)
    bits0, bits1, bits2, bits3 = tl.philox(key, counter, zero + position, zero, zero, 7)
    quarter = token // QUARTER % 4
    low = tl.where(quarter == 0, bits0, bits1)
    return tl.where(quarter < 2, low, tl.where(quarter == 2, bits2, bits3))


# fmt: off
@triton.jit
def _scores_kernel(
    logits, rows, temperature, seed, positions, least, tokens, scores, ids, stride, size, parts,
    QUARTER: tl.constexpr, FILTER: tl.constexpr, MAPPED: tl.constexpr, PDL: tl.constexpr,
):
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    at_row = tl.program_id(0)
    part = tl.program_id(1)
    row = tl.load(rows + at_row).to(tl.int64)
    heat = tl.load(temperature + row)
    key = tl.load(seed + row)
    position = tl.load(positions + at_row).to(tl.uint32) + 1
    line = logits + at_row.to(tl.int64) * stride
    lane = tl.arange(0, QUARTER)
    start = part * (4 * QUARTER)
    best = tl.full([QUARTER], float("-inf"), tl.float32)
    where = tl.zeros([QUARTER], tl.int32) + start
    bound = float("-inf")
    inverse = 1.0
    if FILTER:
        bound = tl.load(least + at_row)
    if heat > 0.0:
        inverse = 1.0 / tl.maximum(heat, 1e-6)
        zero = tl.zeros([QUARTER], tl.uint32)
        counter = (part * QUARTER + lane).to(tl.uint32)
        bits0, bits1, bits2, bits3 = tl.philox(key, counter, zero + position, zero, zero, 7)
    else:
        bits0 = tl.zeros([QUARTER], tl.uint32)
        bits1 = bits0
        bits2 = bits0
        bits3 = bits0
    for quarter in tl.static_range(4):
        at = start + quarter * QUARTER + lane
        token = at
        if MAPPED:
            token = tl.load(tokens + at, mask=at < size, other=0).to(tl.int32)
        value = tl.load(line + at, mask=at < size, other=float("-inf")).to(tl.float32)
        bad = value != value
        score = value
        if heat > 0.0:
            bits = bits0 if quarter == 0 else bits1 if quarter == 1 else bits2 if quarter == 2 else bits3
            if MAPPED:
                bits = _word(key, position, token, QUARTER)
            score = value * inverse + _noise(bits)
            if FILTER:
                score = tl.where(value >= bound, score, float("-inf"))
        score = tl.where(bad, float("inf"), score)
        better = score > best
        best = tl.where(better, score, best)
        where = tl.where(better, token, where)
    winner = tl.max(best, axis=0)
    chosen = tl.min(tl.where(best == winner, where, 2147483647), axis=0)
    tl.store(scores + at_row * parts + part, winner)
    tl.store(ids + at_row * parts + part, chosen)


# fmt: on
@triton.jit
def _choose_kernel(
    scores,
    ids,
    rows,
    positions,
    pool,
    lengths,
    out,
    stops,
    stopped,
    pool_stride,
    parts,
    padding_row,
    context,
    PARTS: tl.constexpr,
    STOPS: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    at_row = tl.program_id(0)
    at = tl.arange(0, PARTS)
    row = tl.load(rows + at_row).to(tl.int64)
    score = tl.load(scores + at_row * parts + at, mask=at < parts, other=float("-inf"))
    token = tl.load(ids + at_row * parts + at, mask=at < parts, other=2147483647)
    winner = tl.max(score, axis=0)
    chosen = tl.min(tl.where(score == winner, token, 2147483647), axis=0)
    finite = tl.abs(winner) < float("inf")
    tl.store(out + at_row, tl.where(finite, chosen, -1))
    if row != padding_row:
        if STOPS > 0:
            ends = tl.load(stops + row * STOPS + tl.arange(0, STOPS)) == chosen
            tl.store(stopped + row, tl.max((ends & finite).to(tl.int32), axis=0))
        position = tl.load(positions + at_row).to(tl.int32) + 1
        tl.store(lengths + row, position)
        # A row that failed continues with token 0, so that the next step reads a valid embedding.
        if position < context:
            tl.store(pool + row * pool_stride + position, tl.where(finite, chosen, 0))


def sample(
    logits_BV: Tensor,
    rows_B: Tensor,
    temperature_R: Tensor,
    top_k_R: Tensor,
    top_p_R: Tensor,
    min_p_R: Tensor,
    seed_R: Tensor,
    positions_B: Tensor,
    pool_RC: Tensor,
    lengths_R: Tensor,
    out_ids_B: Tensor,
    scratch: SampleScratch,
    *,
    stops_RS: Tensor | None = None,
    stopped_R: Tensor | None = None,
    filtered: bool = True,
    pdl: bool = False,
) -> None:
    """Choose one token for each row, append it to the row's pool and advance the row's length.

    Args:
        logits_BV: Logits, bf16, fp16 or fp32, last dimension contiguous.
        rows_B: Row numbers, int32; the last row of `pool_RC` is padding, for which only `out_ids_B` is written.
        temperature_R: Temperatures, float32; 0 takes the largest logit, the first of equals.
        top_k_R: Top-k, int32; 0 for all.
        top_p_R: Top-p, float32; 1 for all. It applies to what top-k leaves; equal logits stay together.
        min_p_R: Min-p, float32; 0 for all. It is relative to the largest probability.
        seed_R: Seeds, int64.
        positions_B: Position of each row's input token, int32 or int64; the new token's is one more.
        pool_RC: Tokens of each row, int32; the chosen id is written at the new position.
        lengths_R: Lengths, int32; set to the new position, the number of tokens whose keys and values are written.
        out_ids_B: Ids, int32; -1 where the row has a NaN or its largest logit is infinite (the pool then gets 0).
        scratch: Scratch for at least this many rows and this vocabulary.
        stops_RS: Tokens at which a row stops, then -1, int32 [R, a power of two]; given with `stopped_R`.
        stopped_R: Flags, int32; set to whether the chosen token is in the row's `stops_RS`.
        filtered: Whether any row may ask for top-k, top-p or min-p; False skips the threshold search.
        pdl: Whether to use programmatic dependent launch.

    Raises:
        ValueError: `filtered` with a scratch that was made without filters.
    """
    asks = Asks(temperature_R, top_k_R, top_p_R, min_p_R, seed_R)
    parts = score_tokens(logits_BV, rows_B, positions_B, asks, scratch, filtered=filtered, pdl=pdl)
    _choose_kernel[(len(logits_BV),)](
        scratch.scores_BS, scratch.ids_BS, rows_B, positions_B, pool_RC, lengths_R, out_ids_B, stops_RS, stopped_R,
        pool_RC.stride(0), parts, pool_RC.shape[0] - 1, pool_RC.shape[1], PARTS=triton.next_power_of_2(parts),
        STOPS=0 if stops_RS is None else stops_RS.shape[1], PDL=pdl, num_warps=1, launch_pdl=pdl,
    )  # fmt: skip


def score_tokens(
    logits_BV: Tensor,
    rows_B: Tensor,
    positions_B: Tensor,
    asks: Asks,
    scratch: SampleScratch,
    *,
    filtered: bool,
    pdl: bool = False,
    ids_D: Tensor | None = None,
) -> int:
    """Leave the best token of each part of the vocabulary, and its score, in `scratch`; return the number of parts.

    Arguments are those of `sample`, and `ids_D`, int64: the token id of each logit; None if they are 0 to D - 1.

    Raises:
        ValueError: `filtered` with a scratch that was made without filters.
    """
    rows, size = logits_BV.shape
    parts = triton.cdiv(size, _BLOCK)
    at_once = scratch.filter_rows if filtered else rows
    for first in range(0, rows, at_once):
        some = slice(first, min(first + at_once, rows))
        logits_AV, rows_A = logits_BV[some], rows_B[some]
        if filtered:
            if scratch.filter is None:
                raise ValueError("this scratch was made without room for filters")
            asked = (rows_A, asks.temperature_R, asks.top_k_R, asks.top_p_R, asks.min_p_R)
            find_least(logits_AV, asked, scratch.filter, scratch.least_B, pdl=pdl)
        _scores_kernel[(len(rows_A), parts)](
            logits_AV, rows_A, asks.temperature_R, asks.seed_R, positions_B[some], scratch.least_B, ids_D,
            scratch.scores_BS[some], scratch.ids_BS[some], logits_AV.stride(0), size, parts,
            QUARTER=_BLOCK // 4, FILTER=filtered, MAPPED=ids_D is not None, PDL=pdl, num_warps=4, launch_pdl=pdl,
        )  # fmt: skip
    return parts
