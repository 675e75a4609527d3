"""Attention to latent vectors over pages on CUDA (Triton), in decodes and in prefills; never writes a page.

All heads attend to the same vectors [c; k], so that the queries of all heads of a token are rows of one product: a
program takes some of them, its lanes, and reads each vector once, for the scores and for the sum of c. Lanes are
counted through tokens and heads, token * H + head. Queries are those behind W_UK, and sums are before W_UV
(engine/model/network/mixers/latent.py). Shape letters as in `ops/latents.py`; D = C + R, B rows of a decode, J jobs of
a prefill.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

if TYPE_CHECKING:
    from torch import Tensor

    from headrace.ops.cuda.latents.shape import LatentShape

__all__ = ["Parts", "LatentTiling", "attend_decode", "attend_prefill"]

_LOG2_E = 1.4426950408889634
_CHUNK = 128
"""Most elements of a sum that one program of the merge adds up."""
_MERGED = 8192
"""Most elements of parts that it reads."""


class LatentTiling(NamedTuple):
    """How the work of one program is cut."""

    lanes: int
    """Queries of a program; a power of two, 16 or more."""
    tile: int
    """Tokens that are read at once; a power of two, 16 or more."""
    warps: int
    stages: int
    """Tiles in shared memory at once."""


class Parts(NamedTuple):
    """What the programs leave that share the tokens of a row, and into how many shares a row may be cut."""

    sums: Tensor
    """Sums of c by row, head and share, float32 [rows * H * splits * C] or more."""
    scores: Tensor
    """Base-2 logarithms of the sums of the weights, float32 [rows * H * splits] or more."""
    splits: int
    """Most shares of a row; a power of two. With 1 there are no parts."""
    least: int
    """Fewest tiles of a share, unless the row has fewer."""


@triton.jit
def _queries(q, lane, real, LATENT: tl.constexpr, ROTATED: tl.constexpr, L: tl.constexpr, R: tl.constexpr):
    """Return both parts of the queries of some lanes; zeros for those that are not real."""
    line = q + lane.to(tl.int64)[:, None] * (LATENT + ROTATED)
    column, turned = tl.arange(0, L)[None, :], tl.arange(0, R)[None, :]
    latent = tl.load(line + column, mask=real[:, None] & (column < LATENT), other=0.0)
    rotated = tl.load(line + LATENT + turned, mask=real[:, None] & (turned < ROTATED), other=0.0)
    return latent, rotated


@triton.jit
def _attend(
    q_latent, q_rotated, limits, kv, pages, begin, end, page_stride, scale,
    LANES: tl.constexpr, LATENT: tl.constexpr, ROTATED: tl.constexpr, L: tl.constexpr, R: tl.constexpr,
    PAGE: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Return (sums of c, base-2 logarithms of the weights' sums) over tokens `begin .. end`, which no limit exceeds.

    Every lane sees the first of these tokens; a lane sees those before its limit. `scale` has log2(e) in it.
    """
    column, turned = tl.arange(0, L)[None, :], tl.arange(0, R)[None, :]
    most = tl.full([LANES], float("-inf"), tl.float32)
    total = tl.zeros([LANES], tl.float32)
    summed = tl.zeros([LANES, L], tl.float32)
    for start in range(begin, end, TILE):
        token = start + tl.arange(0, TILE)
        known = tl.minimum(token, end - 1)  # whose page there is, and what it holds is finite
        page = tl.load(pages + known // PAGE).to(tl.int64)
        line = kv + (page * page_stride + (known % PAGE) * (LATENT + ROTATED))[:, None]
        if LATENT == L:
            latent = tl.load(line + column)
        else:
            latent = tl.load(line + column, mask=(column < LATENT) & (known >= 0)[:, None], other=0.0)
        if ROTATED == R:
            rotated = tl.load(line + LATENT + turned)
        else:
            rotated = tl.load(line + LATENT + turned, mask=(turned < ROTATED) & (known >= 0)[:, None], other=0.0)
        scores = tl.dot(q_latent, tl.trans(latent))
        scores = tl.dot(q_rotated, tl.trans(rotated), scores)
        scores = tl.where(token[None, :] < limits[:, None], scores * scale, float("-inf"))
        higher = tl.maximum(most, tl.max(scores, axis=1))
        ratio = tl.exp2(most - higher)
        weight = tl.exp2(scores - higher[:, None])
        total = total * ratio + tl.sum(weight, axis=1)
        summed = tl.dot(weight.to(latent.dtype), latent, summed * ratio[:, None])
        most = higher
    return summed / total[:, None], most + tl.log2(total)


@triton.jit
def _share(length, TILE: tl.constexpr, SPLITS: tl.constexpr, LEAST: tl.constexpr):
    """Return (tokens of each share of a row, number of shares)."""
    tiles = tl.cdiv(length, TILE)
    each = tl.maximum(tl.cdiv(tiles, SPLITS), LEAST)
    return each * TILE, tl.cdiv(tiles, each)


@triton.jit
def _latent_decode_kernel(
    q, lengths, pages, kv, out, sums, scores, columns, page_stride, scale,
    HEADS: tl.constexpr, LANES: tl.constexpr, LATENT: tl.constexpr, ROTATED: tl.constexpr, L: tl.constexpr,
    R: tl.constexpr, PAGE: tl.constexpr, TILE: tl.constexpr, SPLITS: tl.constexpr, LEAST: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    split = tl.program_id(1)
    row = tl.program_id(2)
    length = tl.load(lengths + row).to(tl.int32)
    size, shares = _share(length, TILE, SPLITS, LEAST)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    if split < shares:
        head = tl.program_id(0) * LANES + tl.arange(0, LANES)
        real = head < HEADS
        lane = row * HEADS + head
        q_latent, q_rotated = _queries(q, lane, real, LATENT, ROTATED, L, R)
        begin = split * size
        end = tl.minimum(begin + size, length)
        limits = tl.zeros([LANES], tl.int32) + end
        summed, score = _attend(
            q_latent, q_rotated, limits, kv, pages + row.to(tl.int64) * columns, begin, end, page_stride, scale,
            LANES, LATENT, ROTATED, L, R, PAGE, TILE,
        )  # fmt: skip
        column = tl.arange(0, L)[None, :]
        mask = real[:, None] & (column < LATENT)
        if shares == 1:
            tl.store(out + lane.to(tl.int64)[:, None] * LATENT + column, summed.to(out.dtype.element_ty), mask=mask)
        else:
            part = lane.to(tl.int64) * SPLITS + split
            tl.store(sums + part[:, None] * LATENT + column, summed, mask=mask)
            tl.store(scores + part, score, mask=real)


@triton.jit
def _latent_merge_kernel(
    lengths, sums, scores, out,
    HEADS: tl.constexpr, LATENT: tl.constexpr, CHUNK: tl.constexpr, TILE: tl.constexpr, SPLITS: tl.constexpr,
    LEAST: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    length = tl.load(lengths + row).to(tl.int32)
    _, shares = _share(length, TILE, SPLITS, LEAST)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    if shares > 1:
        lane = row.to(tl.int64) * HEADS + tl.program_id(1)
        share = tl.arange(0, SPLITS)
        there = share < shares
        column = tl.program_id(2) * CHUNK + tl.arange(0, CHUNK)[None, :]
        score = tl.load(scores + lane * SPLITS + share, mask=there, other=float("-inf"))
        weight = tl.exp2(score - tl.max(score, axis=0))
        mask = there[:, None] & (column < LATENT)
        part = tl.load(sums + (lane * SPLITS + share)[:, None] * LATENT + column, mask=mask, other=0.0)
        result = tl.sum(part * weight[:, None], axis=0)[None, :] / tl.sum(weight, axis=0)
        tl.store(out + lane * LATENT + column, result.to(out.dtype.element_ty), mask=column < LATENT)


def attend_decode(
    q_BHD: Tensor,
    kv_layer: Tensor,
    lengths_B: Tensor,
    pages_BP: Tensor,
    out_BHC: Tensor,
    parts: Parts,
    shape: LatentShape,
    tiling: LatentTiling,
    *,
    pdl: bool = False,
) -> None:
    """Compute `out = softmax(s q [c; k]^T) c` of one token in each row, in one launch, or in two if rows may be cut.

    Args:
        q_BHD: Queries, contiguous.
        kv_layer: Pages of the layer, `[pages, T, D]`, which hold the new tokens already.
        lengths_B: Context length of each row, the new token included, int32.
        pages_BP: Page numbers of each row, int32, contiguous.
        out_BHC: Output, contiguous.
        parts: Room for parts, and how rows are cut.
        shape: The sizes.
        tiling: How the work is cut.
        pdl: Whether to use programmatic dependent launch; lengths are then read before the wait.
    """
    rows, sizes = len(q_BHD), _sizes(shape)
    _latent_decode_kernel[(triton.cdiv(shape.heads, tiling.lanes), parts.splits, rows)](
        q_BHD, lengths_B, pages_BP, kv_layer, out_BHC, parts.sums, parts.scores,
        pages_BP.shape[1], kv_layer.stride(0), shape.scale * _LOG2_E,
        HEADS=shape.heads, LANES=tiling.lanes, **sizes, PAGE=shape.page_size, TILE=tiling.tile, SPLITS=parts.splits,
        LEAST=parts.least, PDL=pdl, num_warps=tiling.warps, num_stages=tiling.stages, launch_pdl=pdl,
    )  # fmt: skip
    if parts.splits > 1:
        chunk = min(_CHUNK, _MERGED // parts.splits, sizes["L"])
        _latent_merge_kernel[(rows, shape.heads, triton.cdiv(shape.latent_dim, chunk))](
            lengths_B, parts.sums, parts.scores, out_BHC,
            HEADS=shape.heads, LATENT=shape.latent_dim, CHUNK=chunk, TILE=tiling.tile, SPLITS=parts.splits,
            LEAST=parts.least, PDL=pdl, num_warps=2, launch_pdl=pdl,
        )  # fmt: skip


@triton.jit
def _latent_prefill_kernel(
    q, jobs, pages, kv, out, page_stride, scale,
    HEADS: tl.constexpr, LANES: tl.constexpr, LATENT: tl.constexpr, ROTATED: tl.constexpr, L: tl.constexpr,
    R: tl.constexpr, PAGE: tl.constexpr, TILE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    job = jobs + tl.program_id(0) * 4
    first, count, offset, page = tl.load(job), tl.load(job + 1), tl.load(job + 2), tl.load(job + 3)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    number = tl.arange(0, LANES)
    real = number < count
    lane = first + tl.minimum(number, count - 1)
    limits = lane // HEADS + offset
    q_latent, q_rotated = _queries(q, lane, real, LATENT, ROTATED, L, R)
    end = (first + count - 1) // HEADS + offset
    summed, _ = _attend(
        q_latent, q_rotated, limits, kv, pages + page, 0, end, page_stride, scale,
        LANES, LATENT, ROTATED, L, R, PAGE, TILE,
    )  # fmt: skip
    column = tl.arange(0, L)[None, :]
    target = out + lane.to(tl.int64)[:, None] * LATENT + column
    tl.store(target, summed.to(out.dtype.element_ty), mask=real[:, None] & (column < LATENT))


def attend_prefill(
    q_NHD: Tensor,
    kv_layer: Tensor,
    jobs_J4: Tensor,
    pages: Tensor,
    out_NHC: Tensor,
    shape: LatentShape,
    tiling: LatentTiling,
    *,
    pdl: bool = False,
) -> None:
    """Compute the same as `attend_decode` for several tokens of each row, of which each sees those up to itself.

    Args:
        q_NHD: Queries of all tokens, contiguous, rows one behind another.
        kv_layer: Pages of the layer, `[pages, T, D]`, which hold the new tokens already.
        jobs_J4: By job its first lane, how many lanes it has (of one row, at most `tiling.lanes`), the position of its
            row's tokens less their number among all, plus 1, and the place of the row's first page in `pages`; int32.
        pages: Page numbers of all rows, int32.
        out_NHC: Output, contiguous.
        shape: The sizes.
        tiling: How the work is cut.
        pdl: Whether to use programmatic dependent launch.
    """
    _latent_prefill_kernel[(len(jobs_J4),)](
        q_NHD, jobs_J4, pages, kv_layer, out_NHC, kv_layer.stride(0), shape.scale * _LOG2_E,
        HEADS=shape.heads, LANES=tiling.lanes, **_sizes(shape), PAGE=shape.page_size, TILE=tiling.tile, PDL=pdl,
        num_warps=tiling.warps, num_stages=tiling.stages, launch_pdl=pdl,
    )  # fmt: skip


def _sizes(shape: LatentShape) -> dict[str, int]:
    """Return the elements of both parts of a vector, and the powers of two that hold them."""
    latent, rotated = shape.latent_dim, shape.rotated_dim
    wide, narrow = (max(16, triton.next_power_of_2(size)) for size in (latent, rotated))
    return {"LATENT": latent, "ROTATED": rotated, "L": wide, "R": narrow}
