"""One row that uses an adapter, on CUDA (Triton): x A^T beside the norm, and the next product with t B within it.

Never used for more rows. A norm of one row leaves the GPU idle, so a few programs share it, and each multiplies its
features of the row with its columns of A. The product sums their results, and so has all that its features need. The
row's norm factor is linear as well, and multiplied last. Letters as in rows.py; P parts.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from headrace.ops.cuda.adapters.rows import LoraBatch, LoraSite

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["ScaledSum", "Waiting", "norm_shrink", "vector_linear_expand"]

_PARTS = 16
_RANK = 16
_WIDTH = 2048


class Waiting(NamedTuple):
    """Update that has not been added to its product yet."""

    low: Tensor
    """t in the form of `shrink`."""
    site: LoraSite


class ScaledSum(NamedTuple):
    """Row times its norm's weight, without the norm's factor, and the values that a product with updates needs."""

    total_1E: Tensor
    """Sum that the norm is of, before the norm's weight."""
    x_1E: Tensor
    squares_P: Tensor
    """Sum of the squares of each part, before the norm's weight, float32."""
    low_RP: Tensor
    """x A^T of each part, without the factor, for all modules of a site, float32; other ranks are undefined."""


@triton.jit(do_not_specialize=["index", "index_before"])
def _norm_shrink_kernel(
    y,
    residual,
    weight,
    total,
    out,
    squares,
    low,
    low_before,
    arena,
    table,
    slots,
    index,
    index_before,
    modules,
    size,
    PARTS: tl.constexpr,
    PART: tl.constexpr,
    RANK: tl.constexpr,
    ADD: tl.constexpr,
    UPDATE: tl.constexpr,
    PDL: tl.constexpr,
):
    part = tl.program_id(0)
    place = tl.program_id(1)
    feature = part * PART + tl.arange(0, PART)
    inside = feature < size
    slot = tl.load(slots)
    line = table + tl.maximum(slot, 0) * modules * 4
    module = line + (index + place) * 4
    ranks = tl.where(slot < 0, 0, tl.load(module + 2))
    first_rank = tl.load(module + 3)
    rank = tl.arange(0, RANK)
    within = rank[:, None] * size + feature[None, :]
    at = arena + tl.load(module).to(tl.int64) * 8 + within
    a = tl.load(at, mask=(rank < ranks)[:, None] & inside[None, :], other=0.0)
    if UPDATE:
        before = line + index_before * 4
        ranks_before = tl.where(slot < 0, 0, tl.load(before + 2))
        at_b = arena + tl.load(before + 1).to(tl.int64) * 8 + within
        b = tl.load(at_b, mask=(rank < ranks_before)[:, None] & inside[None, :], other=0.0)
    scale = tl.load(weight + feature, mask=inside, other=0.0).to(tl.float32)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    value = tl.load(y + feature, mask=inside, other=0.0).to(tl.float32)
    if ADD:
        value += tl.load(residual + feature, mask=inside, other=0.0).to(tl.float32)
    if UPDATE:
        for first in range(0, ranks_before, RANK):
            known = first + rank < ranks_before
            if first > 0:
                at_b += RANK * size
                b = tl.load(at_b, mask=known[:, None] & inside[None, :], other=0.0)
            t = tl.load(low_before + first + rank, mask=known, other=0.0)
            value += tl.sum(t.to(b.dtype).to(tl.float32)[:, None] * b.to(tl.float32), axis=0)
    scaled = (value * scale).to(out.dtype.element_ty)
    if place == 0:
        if ADD:
            tl.store(total + feature, value.to(total.dtype.element_ty), mask=inside)
        tl.store(squares + part, tl.sum(value * value, axis=0))
        tl.store(out + feature, scaled, mask=inside)
    for first in range(0, ranks, RANK):
        known = first + rank < ranks
        if first > 0:
            at += RANK * size
            a = tl.load(at, mask=known[:, None] & inside[None, :], other=0.0)
        t = tl.sum(a.to(tl.float32) * scaled.to(tl.float32)[None, :], axis=1)
        tl.store(low + (first_rank + first + rank) * PARTS + part, t, mask=known)


@triton.jit
def _module(table, slot, low, index, modules, PARTS: tl.constexpr):
    """Return (where B of some features' modules begins in the arena, their ranks, where their t begins)."""
    line = table + (tl.maximum(slot, 0) * modules + index)[:, None] * 4
    ranks = tl.where(slot < 0, 0, tl.load(line + 2))
    return tl.load(line + 1).to(tl.int64) * 8, ranks, low + tl.load(line + 3) * PARTS


@triton.jit
def _lanes(total, BLOCK_OUT: tl.constexpr, WIDTH: tl.constexpr):
    """Return each thread's sum of the eight elements that it loads at once."""
    return tl.sum(tl.reshape(total, (BLOCK_OUT, WIDTH // 8, 8)), axis=2)


@triton.jit(do_not_specialize=["index"])
def _vector_expand_kernel(  # noqa: C901, PLR0915 - one kernel is one launch
    x,
    squares,
    low,
    weight,
    out,
    arena,
    table,
    slots,
    index,
    modules,
    size_out,
    size_in,
    size_0,
    size_1,
    size_2,
    eps,
    GATED: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCK_OUT: tl.constexpr,
    WIDTH: tl.constexpr,
    STEPS: tl.constexpr,
    PASSES: tl.constexpr,
    PDL: tl.constexpr,
):
    LANES: tl.constexpr = WIDTH // 8
    feature = tl.minimum(tl.program_id(0) * BLOCK_OUT + tl.arange(0, BLOCK_OUT), size_out - 1)
    inner = tl.arange(0, WIDTH)
    line = weight + feature.to(tl.int64)[:, None] * size_in + inner[None, :]
    inside = (inner < size_in)[None, :]
    inside_next = (WIDTH + inner < size_in)[None, :]
    w = tl.load(line, mask=inside, other=0.0)
    if STEPS > 1:
        w_next = tl.load(line + WIDTH, mask=inside_next, other=0.0)
    if GATED:
        upper = line + size_out.to(tl.int64) * size_in
        up = tl.load(upper, mask=inside, other=0.0)
        if STEPS > 1:
            up_next = tl.load(upper + WIDTH, mask=inside_next, other=0.0)
    # The update extends the inner dimension: by each rank as often as t has parts, one element for eight others.
    slot = tl.load(slots)
    rank = (tl.arange(0, LANES) // PARTS)[None, :]
    if GATED:
        place = tl.zeros_like(feature)
        size, within = size_0, feature[:, None]
    else:
        place = (feature >= size_0).to(tl.int32) + (feature >= size_0 + size_1).to(tl.int32)
        size = tl.where(place == 0, size_0, tl.where(place == 1, size_1, size_2))[:, None]
        within = (feature - tl.where(place == 0, 0, tl.where(place == 1, size_0, size_0 + size_1)))[:, None]
    begin, ranks, at_t = _module(table, slot, low, index + place, modules, PARTS)
    at_b = arena + begin + (rank * size + within)
    b = tl.load(at_b, mask=rank < ranks, other=0.0)
    at_t += tl.arange(0, LANES)[None, :]
    if GATED:
        begin, ranks_up, at_t_up = _module(table, slot, low, index + place + 1, modules, PARTS)
        at_b_up = arena + begin + (rank * size + within)
        b_up = tl.load(at_b_up, mask=rank < ranks_up, other=0.0)
        at_t_up += tl.arange(0, LANES)[None, :]
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    square = tl.load(squares + tl.arange(0, PARTS))
    t = tl.load(at_t, mask=rank < ranks, other=0.0)
    if GATED:
        t_up = tl.load(at_t_up, mask=rank < ranks_up, other=0.0)
    total = tl.zeros([BLOCK_OUT, WIDTH], tl.float32)
    total_up = tl.zeros([BLOCK_OUT, WIDTH], tl.float32)
    for step in tl.static_range(STEPS):
        value = tl.load(x + step * WIDTH + inner, mask=step * WIDTH + inner < size_in, other=0.0).to(tl.float32)
        if step + 2 < STEPS:
            ahead = (step + 2) * WIDTH
            w_last = tl.load(line + ahead, mask=(ahead + inner < size_in)[None, :], other=0.0)
        total += w.to(tl.float32) * value[None, :]
        if GATED:
            if step + 2 < STEPS:
                up_last = tl.load(upper + ahead, mask=(ahead + inner < size_in)[None, :], other=0.0)
            total_up += up.to(tl.float32) * value[None, :]
        if step + 1 < STEPS:
            w = w_next
            if GATED:
                up = up_next
        if step + 2 < STEPS:
            w_next = w_last
            if GATED:
                up_next = up_last
    lanes = _lanes(total, BLOCK_OUT, WIDTH) + t * b.to(tl.float32)
    if GATED:
        lanes_up = _lanes(total_up, BLOCK_OUT, WIDTH) + t_up * b_up.to(tl.float32)
    for step in range(1, PASSES):
        beyond = step * (LANES // PARTS)
        b = tl.load(at_b + beyond * size, mask=rank + beyond < ranks, other=0.0)
        lanes += tl.load(at_t + step * LANES, mask=rank + beyond < ranks, other=0.0) * b.to(tl.float32)
        if GATED:
            b = tl.load(at_b_up + beyond * size, mask=rank + beyond < ranks_up, other=0.0)
            lanes_up += tl.load(at_t_up + step * LANES, mask=rank + beyond < ranks_up, other=0.0) * b.to(tl.float32)
    factor = tl.rsqrt(tl.sum(square, axis=0) / size_in + eps)
    if GATED:
        gate, up = tl.split(tl.sum(tl.join(lanes, lanes_up), axis=1) * factor)
        result = gate * tl.sigmoid(gate) * up
    else:
        result = tl.sum(lanes, axis=1) * factor
    feature = tl.program_id(0) * BLOCK_OUT + tl.arange(0, BLOCK_OUT)
    tl.store(out + feature, result.to(out.dtype.element_ty), mask=feature < size_out)


def norm_shrink(
    y_1E: Tensor,
    residual_1E: Tensor | None,
    weight_E: Tensor,
    batch: LoraBatch,
    site: LoraSite,
    waiting: Waiting | None,
    *,
    pdl: bool = False,
) -> ScaledSum:
    """Return the sum `residual + y + t B`, with the update that waits, in the form for `vector_linear_expand`.

    No input is overwritten.

    Args:
        y_1E: Output of the last product, bf16, contiguous; fp16 may overflow without the norm's factor.
        residual_1E: Residual in the same dtype, contiguous; None if y is the sum, and no update waits.
        weight_E: Weight of the norm.
        batch: The adapter of the row.
        site: The site of the next product.
        waiting: The update of y, which has one part.
        pdl: Whether to use programmatic dependent launch; the last two kernels must not write weights, arena or tables.
    """
    size, modules = y_1E.shape[1], len(site.sizes_out)
    part = triton.next_power_of_2(triton.cdiv(size, _PARTS))
    total_1E, out_1E = y_1E if residual_1E is None else torch.empty_like(y_1E), torch.empty_like(y_1E)
    squares_P = torch.empty(_PARTS, dtype=torch.float32, device=y_1E.device)
    low_RP = torch.empty(modules * batch.max_rank, _PARTS, dtype=torch.float32, device=y_1E.device)
    _norm_shrink_kernel[(_PARTS, modules)](
        y_1E, y_1E if residual_1E is None else residual_1E, weight_E, total_1E, out_1E, squares_P, low_RP,
        squares_P if waiting is None else waiting.low, batch.arena, batch.table, batch.slots_N,
        site.line, 0 if waiting is None else waiting.site.line, batch.table.shape[1], size,
        PARTS=_PARTS, PART=part,
        RANK=min(_RANK, triton.next_power_of_2(batch.max_rank)), ADD=residual_1E is not None,
        UPDATE=waiting is not None, PDL=pdl, num_warps=max(1, part // 256), launch_pdl=pdl,
    )  # fmt: skip
    return ScaledSum(total_1E, out_1E, squares_P, low_RP)


def vector_linear_expand(
    row: ScaledSum,
    weight_OI: Tensor,
    out_1O: Tensor,
    eps: float,
    batch: LoraBatch,
    site: LoraSite,
    *,
    gated: bool = False,
    pdl: bool = False,
) -> None:
    """Compute `out = norm(x) W^T` with the row's updates.

    Args:
        row: The result of `norm_shrink` for the same batch and site.
        weight_OI: Weight, bf16, contiguous. With `gated`, O gate rows, then O up rows.
        out_1O: Output, bf16, contiguous.
        eps: Epsilon of the norm.
        batch: The adapter of the row.
        site: The site of this product, of two or three modules.
        gated: Whether to compute `out = silu(gate) * up`.
        pdl: The same as for `norm_shrink`.
    """
    size_in, size_out = weight_OI.shape[1], out_1O.shape[1]
    width = min(_WIDTH, max(8 * _PARTS, triton.next_power_of_2(size_in)))
    block_out = 1 if width > 1024 else 4 if gated else 8
    _vector_expand_kernel[(triton.cdiv(size_out, block_out),)](
        row.x_1E, row.squares_P, row.low_RP, weight_OI, out_1O, batch.arena, batch.table, batch.slots_N,
        site.line, batch.table.shape[1], size_out, size_in, *(*site.sizes_out, 0)[:3], eps,
        GATED=gated, PARTS=_PARTS, BLOCK_OUT=block_out, WIDTH=width, STEPS=triton.cdiv(size_in, width),
        PASSES=triton.cdiv(batch.max_rank * _PARTS, width // 8), PDL=pdl,
        num_warps=8 if gated or width > 1024 else 4, launch_pdl=pdl,
    )  # fmt: skip
