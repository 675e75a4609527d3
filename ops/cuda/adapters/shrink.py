"""Computes t = x A^T of each token's own low-rank adapter on CUDA (Triton): many adapters of any ranks in one launch.

Reads each A in place, at its own rank; never pads one to another's rank. A launch fetches its first tiles while the
kernel before still runs, as no kernel of a step writes adapters or tables. Nothing is zeroed or added atomically: each
split of the inner dimension has a plane of its own, summed by expand.py in order. Letters as in rows.py.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from headrace.ops.cuda.adapters.rows import GROUP, SEGMENT, LoraBatch, LoraSite, UpdateTiling

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["look_up", "shrink", "shrink_tiling"]

_RANK_LANES = 4
_PROGRAMS = 264


@triton.jit(do_not_specialize=["index"])
def _shrink_row_kernel(
    x,
    arena,
    table,
    entries,
    planes,
    index,
    modules,
    size_in,
    x_stride,
    split_stride,
    MODULES: tl.constexpr,
    PLANE: tl.constexpr,
    RANK: tl.constexpr,
    BLOCK: tl.constexpr,
    STEPS: tl.constexpr,
    LANES: tl.constexpr,
    PDL: tl.constexpr,
):
    lane = tl.program_id(0) % LANES
    split = tl.program_id(0) // LANES
    inner = split * (STEPS * BLOCK) + tl.arange(0, BLOCK)
    entry = entries + tl.program_id(1) * 4
    slot = tl.load(entry)
    token = tl.load(entry + 3).to(tl.int64)
    module = table + (tl.maximum(slot, 0) * modules + index) * 4
    last = module + (MODULES - 1) * 4
    ranks = tl.where(slot < 0, 0, tl.load(last + 2) + tl.load(last + 3))
    rank = lane * RANK + tl.arange(0, RANK)
    line = arena + tl.load(module).to(tl.int64) * 8 + rank.to(tl.int64)[:, None] * size_in + inner[None, :]
    known = (rank < ranks)[:, None]
    a = tl.load(line, mask=known & (inner < size_in)[None, :], other=0.0)
    if STEPS > 1:
        b = tl.load(line + BLOCK, mask=known & (inner + BLOCK < size_in)[None, :], other=0.0)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    source = x + token * x_stride + inner
    target = planes + split * split_stride + token * PLANE
    for first in range(lane * RANK, ranks, LANES * RANK):
        if first > lane * RANK:  # the ranks beyond those that one pass covers
            rank += LANES * RANK
            known = (rank < ranks)[:, None]
            line += LANES * RANK * size_in.to(tl.int64)
            a = tl.load(line, mask=known & (inner < size_in)[None, :], other=0.0)
            if STEPS > 1:
                b = tl.load(line + BLOCK, mask=known & (inner + BLOCK < size_in)[None, :], other=0.0)
        total = tl.zeros([RANK, BLOCK], tl.float32)
        value = tl.load(source, mask=inner < size_in, other=0.0)
        for step in tl.static_range(STEPS):
            if step + 2 < STEPS:
                beyond = inner + (step + 2) * BLOCK < size_in
                c = tl.load(line + (step + 2) * BLOCK, mask=known & beyond[None, :], other=0.0)
            if step + 1 < STEPS:
                following = tl.load(source + (step + 1) * BLOCK, mask=inner + (step + 1) * BLOCK < size_in, other=0.0)
            total += a.to(tl.float32) * value.to(tl.float32)[None, :]
            if step + 1 < STEPS:
                a = b
                value = following
            if step + 2 < STEPS:
                b = c
        tl.store(target + rank, tl.sum(total, axis=1), mask=rank < ranks)


@triton.jit(do_not_specialize=["index"])
def _shrink_group_kernel(
    x,
    arena,
    table,
    entries,
    counts,
    order,
    planes,
    index,
    modules,
    size_in,
    x_stride,
    split_stride,
    MODULES: tl.constexpr,
    PLANE: tl.constexpr,
    ROWS: tl.constexpr,
    RANK: tl.constexpr,
    BLOCK: tl.constexpr,
    STEPS: tl.constexpr,
    LANES: tl.constexpr,
    PARTS: tl.constexpr,
    PDL: tl.constexpr,
):
    items = tl.load(counts) * PARTS
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.arange(0, ROWS)
    for item in range(tl.program_id(0), items, tl.num_programs(0)):
        lane = item % PARTS % LANES
        split = item % PARTS // LANES
        entry = entries + item // PARTS * 4
        module = table + (tl.load(entry) * modules + index) * 4
        last = module + (MODULES - 1) * 4
        ranks = tl.load(last + 2) + tl.load(last + 3)
        a = arena + tl.load(module).to(tl.int64) * 8
        real = row < tl.load(entry + 2)
        token = tl.load(order + tl.load(entry + 1) + row, mask=real, other=0).to(tl.int64)
        for first in range(lane * RANK, ranks, LANES * RANK):
            rank = first + tl.arange(0, RANK)
            line = a + rank.to(tl.int64)[:, None] * size_in
            total = tl.zeros([ROWS, RANK], tl.float32)
            for step in range(STEPS):
                inner = (split * STEPS + step) * BLOCK + tl.arange(0, BLOCK)
                inside = (inner < size_in)[None, :]
                value = tl.load(x + token[:, None] * x_stride + inner[None, :], mask=real[:, None] & inside, other=0.0)
                w = tl.load(line + inner[None, :], mask=(rank < ranks)[:, None] & inside, other=0.0)
                total = tl.dot(value, w.T, total)
            target = planes + split * split_stride + token[:, None] * PLANE + rank[None, :]
            tl.store(target, total, mask=real[:, None] & (rank < ranks)[None, :])


@triton.jit(do_not_specialize=["index"])
def _shrink_long_kernel(
    x,
    arena,
    table,
    entries,
    planes,
    index,
    modules,
    size_in,
    steps,
    x_stride,
    split_stride,
    MODULES: tl.constexpr,
    PLANE: tl.constexpr,
    ROWS: tl.constexpr,
    RANK: tl.constexpr,
    BLOCK: tl.constexpr,
    LANES: tl.constexpr,
):
    lane = tl.program_id(0) % LANES
    split = tl.program_id(0) // LANES
    entry = entries + tl.program_id(1) * 4
    slot = tl.load(entry)
    module = table + (tl.maximum(slot, 0) * modules + index) * 4
    last = module + (MODULES - 1) * 4
    ranks = tl.where(slot < 0, 0, tl.load(last + 2) + tl.load(last + 3))
    a = arena + tl.load(module).to(tl.int64) * 8
    token = tl.load(entry + 3).to(tl.int64) + tl.arange(0, ROWS)
    real = (tl.arange(0, ROWS) < tl.load(entry + 2))[:, None]
    for first in range(lane * RANK, ranks, LANES * RANK):
        rank = first + tl.arange(0, RANK)
        line = a + rank.to(tl.int64)[:, None] * size_in
        total = tl.zeros([ROWS, RANK], tl.float32)
        for step in range(split * steps, (split + 1) * steps):
            at = step * BLOCK + tl.arange(0, BLOCK)
            inside = (at < size_in)[None, :]
            value = tl.load(x + token[:, None] * x_stride + at[None, :], mask=real & inside, other=0.0)
            w = tl.load(line + at[None, :], mask=(rank < ranks)[:, None] & inside, other=0.0)
            total = tl.dot(value, w.T, total)
        target = planes + split * split_stride + token[:, None] * PLANE + rank[None, :]
        tl.store(target, total, mask=real & (rank < ranks)[None, :])


@triton.jit
def _look_up_kernel(tokens, arena, table, slots, planes, index, modules, PLANE: tl.constexpr, RANK: tl.constexpr):
    token = tl.program_id(0)
    slot = tl.load(slots + token)
    module = table + (tl.maximum(slot, 0) * modules + index) * 4
    ranks = tl.where(slot < 0, 0, tl.load(module + 2))
    rank = tl.arange(0, RANK)
    line = arena + tl.load(module).to(tl.int64) * 8 + tl.load(tokens + token).to(tl.int64) * ranks + rank
    low = tl.load(line, mask=rank < ranks, other=0.0).to(tl.float32)
    tl.store(planes + token.to(tl.int64) * PLANE + rank, low, mask=rank < ranks)


def look_up(tokens_N: Tensor, batch: LoraBatch, site: LoraSite) -> Tensor:
    """Return t for updates of embeddings, in the form of `shrink`: the line of A for each token id (int32 or int64)."""
    planes = torch.empty(1, len(tokens_N), batch.max_rank, dtype=torch.float32, device=batch.arena.device)
    _look_up_kernel[(len(tokens_N),)](
        tokens_N, batch.arena, batch.table, batch.slots_N, planes, site.line, batch.table.shape[1],
        PLANE=batch.max_rank, RANK=triton.next_power_of_2(batch.max_rank), num_warps=1,
    )  # fmt: skip
    return planes


def shrink(
    x_NI: Tensor, batch: LoraBatch, site: LoraSite, *, how: UpdateTiling | None = None, pdl: bool = False
) -> Tensor:
    """Return t = x A^T of each token's adapter.

    Args:
        x_NI: Input in the arena's dtype, last dimension contiguous.
        batch: The adapters of the tokens.
        site: The site of the product.
        how: Division of the work; None for that of `shrink_tiling`.
        pdl: Whether to use programmatic dependent launch; the last two kernels must not write the arena or the tables.

    Returns:
        float32 [splits, N, M * R], which `expand` sums; values past a token's own ranks are undefined.
    """
    how = shrink_tiling(batch, site) if how is None else how
    modules, entries = len(site.sizes_out), batch.entries_E4.shape[0]
    lanes = modules * max(1, min(_RANK_LANES, batch.max_rank // how.rank))
    splits = triton.cdiv(site.size_in, how.block * how.steps)
    size = (splits, batch.order_N.shape[0], modules * batch.max_rank)
    planes = torch.empty(size, dtype=torch.float32, device=batch.arena.device)
    common = (site.line, batch.table.shape[1], site.size_in)
    strides = (x_NI.stride(0), planes.stride(0))
    where = (batch.arena, batch.table, batch.entries_E4)
    options = {
        "MODULES": modules, "PLANE": planes.shape[2], "RANK": how.rank, "BLOCK": how.block, "LANES": lanes,
        "num_warps": how.warps,
    }  # fmt: skip
    grid = (lanes * splits, entries)
    if batch.rows == SEGMENT:
        _shrink_long_kernel[grid](x_NI, *where, planes, *common, how.steps, *strides, ROWS=SEGMENT, **options)
    elif batch.rows == 1:
        _shrink_row_kernel[grid](
            x_NI, *where, planes, *common, *strides, STEPS=how.steps, PDL=pdl, launch_pdl=pdl, **options
        )
    else:
        _shrink_group_kernel[(min(lanes * splits * entries, _PROGRAMS),)](
            x_NI, *where, batch.counts, batch.order_N, planes, *common, *strides,
            ROWS=batch.rows, STEPS=how.steps, PARTS=lanes * splits, PDL=pdl, launch_pdl=pdl, **options,
        )  # fmt: skip
    return planes


def shrink_tiling(batch: LoraBatch, site: LoraSite) -> UpdateTiling:
    """Return the division of the work of `shrink` for a batch."""
    entries, modules = batch.entries_E4.shape[0], len(site.sizes_out)
    if batch.rows == SEGMENT:
        splits = max(1, min(8, _PROGRAMS // (entries * modules)))
        return UpdateTiling(16, 128, 4, triton.cdiv(triton.cdiv(site.size_in, 128), splits))
    if batch.rows == GROUP:
        return UpdateTiling(16, 256, 4, 2)
    if entries > 128:
        return UpdateTiling(8, 256, 1, 8 if modules > 1 else 4)
    programs = entries * modules * triton.cdiv(site.size_in, 256)
    return UpdateTiling(16, 256, 4, 1 if programs <= 512 else 2 if programs <= 2048 else 4)
