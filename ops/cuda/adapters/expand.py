"""Adds t B of each token's own low-rank adapter on CUDA (Triton): to y, before silu(gate) * up, or before a norm.

Reads each B in place, at its own rank, and its first tile while the kernel before still runs; sums over the splits of t
are in a fixed order. Never writes a column of a token that has no update there. Letters as in rows.py.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from headrace.ops.cuda.adapters.rows import ALIKE, GROUP, LoraBatch, LoraSite, UpdateTiling, module_of

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["expand", "expand_add_norm", "expand_silu_mul", "expand_tiling"]

_PROGRAMS = 528
_STAGES = 3


@triton.jit
def _row_times(planes, rank, known, split_stride, w, SPLITS: tl.constexpr):
    """Return t B for some ranks of a token, with t summed over the splits and rounded as it would be in memory."""
    split = tl.arange(0, triton.next_power_of_2(SPLITS))[:, None]
    at = planes + split * split_stride + rank[None, :]
    t = tl.sum(tl.load(at, mask=(split < SPLITS) & known[None, :], other=0.0), axis=0)
    return tl.sum(t.to(w.dtype).to(tl.float32)[:, None] * w.to(tl.float32), axis=0)


@triton.jit(do_not_specialize=["index"])
def _expand_row_kernel(  # noqa: PLR0915 - one kernel is one launch
    y,
    out,
    arena,
    table,
    entries,
    planes,
    index,
    modules,
    y_stride,
    out_stride,
    split_stride,
    size_0,
    size_1,
    size_2,
    MODULES: tl.constexpr,
    GATED: tl.constexpr,
    PLANE: tl.constexpr,
    RANK: tl.constexpr,
    BLOCK: tl.constexpr,
    STEPS: tl.constexpr,
    SPLITS: tl.constexpr,
    PDL: tl.constexpr,
):
    place, size, before, chunk = module_of(
        tl.program_id(0), size_0, size_1, size_2, BLOCK * STEPS, 1 if GATED else MODULES
    )
    entry = entries + tl.program_id(1) * 4
    slot = tl.load(entry)
    token = tl.load(entry + 3).to(tl.int64)
    module = table + (tl.maximum(slot, 0) * modules + index + place) * 4
    ranks = tl.where(slot < 0, 0, tl.load(module + 2))
    most = ranks
    rank = tl.arange(0, RANK)
    feature = chunk * (BLOCK * STEPS) + tl.arange(0, BLOCK)
    line = arena + tl.load(module + 1).to(tl.int64) * 8 + rank.to(tl.int64)[:, None] * size + feature[None, :]
    inside = feature < size
    w = tl.load(line, mask=(rank < ranks)[:, None] & inside[None, :], other=0.0)
    if GATED:
        ranks_up = tl.where(slot < 0, 0, tl.load(module + 6))
        most = tl.maximum(ranks, ranks_up)
        upper = (tl.load(module + 5) - tl.load(module + 1)).to(tl.int64) * 8
        up = tl.load(line + upper, mask=(rank < ranks_up)[:, None] & inside[None, :], other=0.0)
        low_up = planes + token * PLANE + tl.load(module + 7)
    low = planes + token * PLANE + tl.load(module + 3)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    source = y + token * y_stride + before
    target = out + token * out_stride + before
    if most > 0 or GATED:
        blocks = tl.maximum(tl.cdiv(most, RANK), 1)
        total = tl.load(source + feature, mask=inside, other=0.0).to(tl.float32)
        if GATED:
            total_up = tl.load(source + size + feature, mask=inside, other=0.0).to(tl.float32)
        at = 0
        for item in range(STEPS * blocks):
            # The next tile: the next ranks of these features, or the first ranks of the next features.
            done = at + 1 == blocks
            following = tl.where(done, 0, at + 1)
            ahead = feature + tl.where(done, BLOCK, 0)
            inside_next = (ahead < size) & (item + 1 < STEPS * blocks)
            rank_next = following * RANK + rank
            move = tl.where(done, BLOCK - at * RANK * size.to(tl.int64), RANK * size.to(tl.int64))
            line += move
            w_next = tl.load(line, mask=(rank_next < ranks)[:, None] & inside_next[None, :], other=0.0)
            y_next = tl.load(source + ahead, mask=inside_next & done, other=0.0).to(tl.float32)
            now = at * RANK + rank
            total += _row_times(low, now, now < ranks, split_stride, w, SPLITS)
            if GATED:
                up_next = tl.load(line + upper, mask=(rank_next < ranks_up)[:, None] & inside_next[None, :], other=0.0)
                y_up_next = tl.load(source + size + ahead, mask=inside_next & done, other=0.0).to(tl.float32)
                total_up += _row_times(low_up, now, now < ranks_up, split_stride, up, SPLITS)
            if done:
                if GATED:
                    result = total * tl.sigmoid(total) * total_up
                    total_up = y_up_next
                else:
                    result = total
                tl.store(target + feature, result.to(out.dtype.element_ty), mask=inside)
                total = y_next
            w = w_next
            if GATED:
                up = up_next
            at = following
            feature = ahead
            inside = inside_next


@triton.jit
def _group_low(planes, token, real, rank, known, split_stride, PLANE: tl.constexpr, SPLITS: tl.constexpr):
    """Return t of some tokens and ranks, summed over the splits: float32 [tokens, ranks]."""
    at = planes + token[:, None] * PLANE + rank[None, :]
    total = tl.load(at, mask=real[:, None] & known[None, :], other=0.0)
    for split in tl.static_range(1, SPLITS):
        total += tl.load(at + split * split_stride, mask=real[:, None] & known[None, :], other=0.0)
    return total


@triton.jit(do_not_specialize=["index"])
def _expand_group_kernel(
    y,
    out,
    arena,
    table,
    entries,
    counts,
    order,
    planes,
    index,
    modules,
    y_stride,
    out_stride,
    split_stride,
    tiles,
    size_0,
    size_1,
    size_2,
    MODULES: tl.constexpr,
    GATED: tl.constexpr,
    PLANE: tl.constexpr,
    ROWS: tl.constexpr,
    RANK: tl.constexpr,
    BLOCK: tl.constexpr,
    SPLITS: tl.constexpr,
    PDL: tl.constexpr,
):
    items = tl.load(counts + GATED) * tiles
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.arange(0, ROWS)
    for item in range(tl.program_id(0), items, tl.num_programs(0)):
        place, size, before, tile = module_of(item % tiles, size_0, size_1, size_2, BLOCK, 1 if GATED else MODULES)
        entry = entries + item // tiles * 4
        slot = tl.load(entry)
        module = table + (tl.maximum(slot, 0) * modules + index + place) * 4
        ranks = tl.where(slot < 0, 0, tl.load(module + 2))
        most = ranks
        feature = tile * BLOCK + tl.arange(0, BLOCK)
        inside = (feature < size)[None, :]
        b = arena + tl.load(module + 1).to(tl.int64) * 8 + feature[None, :]
        low = planes + tl.load(module + 3)
        real = row < tl.load(entry + 2)
        token = tl.load(order + tl.load(entry + 1) + row, mask=real, other=0).to(tl.int64)
        mask = real[:, None] & inside
        source = y + token[:, None] * y_stride + before + feature[None, :]
        total = tl.load(source, mask=mask, other=0.0).to(tl.float32)
        if GATED:
            ranks_up = tl.where(slot < 0, 0, tl.load(module + 6))
            most = tl.maximum(ranks, ranks_up)
            b_up = arena + tl.load(module + 5).to(tl.int64) * 8 + feature[None, :]
            low_up = planes + tl.load(module + 7)
            total_up = tl.load(source + size, mask=mask, other=0.0).to(tl.float32)
        for first in range(0, most, RANK):
            rank = first + tl.arange(0, RANK)
            line = rank.to(tl.int64)[:, None] * size
            known = rank < ranks
            w = tl.load(b + line, mask=known[:, None] & inside, other=0.0)
            t = _group_low(low, token, real, rank, known, split_stride, PLANE, SPLITS)
            total = tl.dot(t.to(w.dtype), w, total)
            if GATED:
                known = rank < ranks_up
                up = tl.load(b_up + line, mask=known[:, None] & inside, other=0.0)
                t = _group_low(low_up, token, real, rank, known, split_stride, PLANE, SPLITS)
                total_up = tl.dot(t.to(up.dtype), up, total_up)
        if GATED:
            total = total * tl.sigmoid(total) * total_up
        target = out + token[:, None] * out_stride + before + feature[None, :]
        tl.store(target, total.to(out.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["index"])
def _expand_norm_kernel(
    y,
    residual,
    weight,
    out,
    arena,
    table,
    slots,
    planes,
    index,
    modules,
    y_stride,
    residual_stride,
    out_stride,
    split_stride,
    size,
    eps,
    PLANE: tl.constexpr,
    RANK: tl.constexpr,
    BLOCK: tl.constexpr,
    SPLITS: tl.constexpr,
    PDL: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    feature = tl.arange(0, BLOCK)
    inside = feature < size
    scale = tl.load(weight + feature, mask=inside, other=0.0).to(tl.float32)
    slot = tl.load(slots + token)
    module = table + (tl.maximum(slot, 0) * modules + index) * 4
    ranks = tl.where(slot < 0, 0, tl.load(module + 2))
    rank = tl.arange(0, RANK)
    at = rank.to(tl.int64)[:, None] * size + feature[None, :]
    line = arena + tl.load(module + 1).to(tl.int64) * 8 + at
    w = tl.load(line, mask=(rank < ranks)[:, None] & inside[None, :], other=0.0)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    value = tl.load(y + token * y_stride + feature, mask=inside, other=0.0).to(tl.float32)
    value += tl.load(residual + token * residual_stride + feature, mask=inside, other=0.0).to(tl.float32)
    split = tl.arange(0, triton.next_power_of_2(SPLITS))[:, None]
    low = planes + split * split_stride + token * PLANE
    for _ in range(0, ranks, RANK):
        line += RANK * size.to(tl.int64)
        w_next = tl.load(line, mask=(rank + RANK < ranks)[:, None] & inside[None, :], other=0.0)
        t = tl.sum(tl.load(low + rank[None, :], mask=(split < SPLITS) & (rank < ranks)[None, :], other=0.0), axis=0)
        value += tl.sum(t.to(w.dtype).to(tl.float32)[:, None] * w.to(tl.float32), axis=0)
        rank += RANK
        w = w_next
    tl.store(residual + token * residual_stride + feature, value.to(residual.dtype.element_ty), mask=inside)
    factor = tl.rsqrt(tl.sum(value * value, axis=0) / size + eps)
    tl.store(out + token * out_stride + feature, (value * factor * scale).to(out.dtype.element_ty), mask=inside)


def expand(
    planes: Tensor,
    y_NO: Tensor,
    batch: LoraBatch,
    site: LoraSite,
    *,
    how: UpdateTiling | None = None,
    pdl: bool = False,
) -> None:
    """Compute `y += t B` in place, for the tokens that have an adapter.

    Args:
        planes: The result of `shrink` for the same batch and site.
        y_NO: The product, its modules side by side; last dimension contiguous.
        batch: The adapters of the tokens.
        site: The site of the product.
        how: Division of the work; None for that of `expand_tiling`.
        pdl: The same as for `shrink`.
    """
    _expand(planes, y_NO, y_NO, batch, site, how, gated=False, pdl=pdl)


def expand_silu_mul(
    planes: Tensor,
    gate_up_N2F: Tensor,
    out_NF: Tensor,
    batch: LoraBatch,
    site: LoraSite,
    *,
    how: UpdateTiling | None = None,
    pdl: bool = False,
) -> None:
    """Compute `out = silu(gate + t_0 B_0) * (up + t_1 B_1)` for all tokens, with t = 0 for those without an adapter.

    The other arguments are those of `expand`.
    """
    _expand(planes, gate_up_N2F, out_NF, batch, site, how, gated=True, pdl=pdl)


def expand_add_norm(
    planes: Tensor,
    y_NE: Tensor,
    residual_NE: Tensor,
    weight_E: Tensor,
    eps: float,
    batch: LoraBatch,
    site: LoraSite,
    *,
    pdl: bool = False,
) -> None:
    """Do `expand`, `residual += y`, and `y = residual / rms(residual) * weight`, for few tokens and a one-module site.

    The norm is taken of the float32 sum, before it is rounded to the residual's dtype.
    """
    size = y_NE.shape[1]
    _expand_norm_kernel[(y_NE.shape[0],)](
        y_NE, residual_NE, weight_E, y_NE, batch.arena, batch.table, batch.slots_N, planes,
        site.line, batch.table.shape[1], y_NE.stride(0), residual_NE.stride(0), y_NE.stride(0), planes.stride(0),
        size, eps,
        PLANE=planes.shape[2], RANK=4 if batch.rows == ALIKE else 8, BLOCK=triton.next_power_of_2(size),
        SPLITS=len(planes), PDL=pdl,
        num_warps=min(16, max(4, triton.next_power_of_2(size) // 256)), launch_pdl=pdl,
    )  # fmt: skip


def _expand(
    planes: Tensor,
    y_NO: Tensor,
    out_NO: Tensor,
    batch: LoraBatch,
    site: LoraSite,
    how: UpdateTiling | None,
    *,
    gated: bool,
    pdl: bool,
) -> None:
    how = expand_tiling(batch, site, gated=gated) if how is None else how
    sizes = site.sizes_out[:1] if gated else site.sizes_out
    entries = batch.entries_E4.shape[0]
    common = (site.line, batch.table.shape[1], y_NO.stride(0), out_NO.stride(0), planes.stride(0))
    size_012 = (*site.sizes_out, 0, 0)[:3]
    where = (batch.arena, batch.table, batch.entries_E4)
    options = {
        "MODULES": len(site.sizes_out), "GATED": gated, "PLANE": planes.shape[2], "RANK": how.rank,
        "BLOCK": how.block, "SPLITS": planes.shape[0], "PDL": pdl, "num_warps": how.warps, "launch_pdl": pdl,
    }  # fmt: skip
    tiles = sum(triton.cdiv(size, how.block * how.steps) for size in sizes)
    if batch.rows == 1:
        _expand_row_kernel[(tiles, entries)](
            y_NO, out_NO, *where, planes, *common, *size_012, STEPS=how.steps, **options
        )
    else:
        _expand_group_kernel[(min(tiles * entries, _PROGRAMS),)](
            y_NO, out_NO, *where, batch.counts, batch.order_N, planes, *common, tiles, *size_012,
            ROWS=batch.rows, num_stages=_stages(batch, how, len(planes), gated=gated), **options,
        )  # fmt: skip


def _stages(batch: LoraBatch, how: UpdateTiling, splits: int, *, gated: bool) -> int:
    """Return how many steps over ranks load at the same time: three, or as many as shared memory has room for."""
    step_bytes = how.rank * (4 * splits * batch.rows + 2 * how.block) * (2 if gated else 1)
    return max(1, min(_STAGES, batch.shared_bytes // step_bytes))


def expand_tiling(batch: LoraBatch, site: LoraSite, *, gated: bool) -> UpdateTiling:
    """Return the division of the work of `expand` for a batch."""
    if batch.rows != 1:
        return UpdateTiling(16, 256, 8) if gated and batch.rows == GROUP else UpdateTiling(16, 64 if gated else 128, 4)
    entries = batch.entries_E4.shape[0]
    if entries <= 4:
        return UpdateTiling(8, 256, 1)
    tiles = entries * sum(triton.cdiv(size, 512) for size in site.sizes_out[: 1 if gated else None])
    if gated:
        return UpdateTiling(8, 512, 2, 8 if tiles > 4096 else 4 if tiles > 1024 else 1)
    if entries > 128 and len(site.sizes_out) == 1:
        return UpdateTiling(8, 1024, 4, 2)
    return UpdateTiling(8, 512, 2, 4 if tiles > 2560 else 1 if tiles <= 1024 else 2)
