"""Low-rank updates of up to 64 rows that use one adapter or none, on CUDA (Triton); never serves two adapters.

The adapter is read once, and multiplied with all rows on tensor cores; for rows without it, t counts as zeros. So
nothing is gathered or sorted, and a program of `expand_alike` loads all but t and y while the product before it still
runs. Letters as in rows.py; next to read: products.py.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from headrace.ops.cuda.adapters.rows import LoraBatch, LoraSite, module_of

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["expand_alike", "shrink_alike"]

_BLOCK_IN = 128
_BLOCK_OUT = 64
_SPLIT = 1024


@triton.jit(do_not_specialize=["index", "rows"])
def _shrink_alike_kernel(
    x,
    arena,
    table,
    entries,
    planes,
    index,
    modules,
    rows,
    size_in,
    x_stride,
    split_stride,
    MODULES: tl.constexpr,
    PLANE: tl.constexpr,
    ROWS: tl.constexpr,
    RANK: tl.constexpr,
    BLOCK: tl.constexpr,
    SPLITS: tl.constexpr,
):
    split = tl.program_id(0)
    slot = tl.load(entries)
    module = table + (tl.maximum(slot, 0) * modules + index) * 4
    last = module + (MODULES - 1) * 4
    ranks = tl.where(slot < 0, 0, tl.load(last + 2) + tl.load(last + 3))
    a = arena + tl.load(module).to(tl.int64) * 8
    row = tl.arange(0, ROWS)
    each = tl.cdiv(tl.cdiv(size_in, SPLITS), BLOCK) * BLOCK
    end = tl.minimum((split + 1) * each, size_in)
    for first in range(0, ranks, RANK):
        rank = first + tl.arange(0, RANK)
        line = a + rank.to(tl.int64)[:, None] * size_in
        total = tl.zeros([ROWS, RANK], tl.float32)
        for begin in range(split * each, end, BLOCK):
            at = begin + tl.arange(0, BLOCK)
            inside = (at < end)[None, :]
            w = tl.load(line + at[None, :], mask=(rank < ranks)[:, None] & inside, other=0.0)
            value = tl.load(x + row[:, None] * x_stride + at[None, :], mask=(row < rows)[:, None] & inside, other=0.0)
            total = tl.dot(value, w.T, total)
        target = planes + split * split_stride + row[:, None] * PLANE + rank[None, :]
        tl.store(target, total, mask=(row < rows)[:, None] & (rank < ranks)[None, :])


@triton.jit
def _add(total, b, module, planes, row, uses, rank, ranks, split_stride, PLANE: tl.constexpr, SPLITS: tl.constexpr):
    """Return `total` plus t B of some ranks of one module."""
    at = planes + tl.load(module + 3) + row[:, None] * PLANE + rank[None, :]
    mask = uses[:, None] & (rank < ranks)[None, :]
    t = tl.load(at, mask=mask, other=0.0)
    for split in tl.static_range(1, SPLITS):
        t += tl.load(at + split * split_stride, mask=mask, other=0.0)
    return tl.dot(t.to(b.dtype), b, total)


@triton.jit(do_not_specialize=["index", "rows"])
def _expand_alike_kernel(
    y,
    out,
    arena,
    table,
    slots,
    entries,
    planes,
    index,
    modules,
    rows,
    y_stride,
    out_stride,
    split_stride,
    size_0,
    size_1,
    size_2,
    MODULES: tl.constexpr,
    GATED: tl.constexpr,
    PLANE: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    SPLITS: tl.constexpr,
    PDL: tl.constexpr,
):
    place, size, before, tile = module_of(tl.program_id(0), size_0, size_1, size_2, BLOCK, 1 if GATED else MODULES)
    feature = tile * BLOCK + tl.arange(0, BLOCK)
    row = tl.arange(0, ROWS)
    rank = tl.arange(0, 16)
    inside = (feature < size)[None, :]
    mask = (row < rows)[:, None] & inside
    slot = tl.load(entries)
    uses = (tl.load(slots + row, mask=row < rows, other=-1) == slot) & (slot >= 0)
    module = table + (tl.maximum(slot, 0) * modules + index + place) * 4
    ranks = tl.where(slot < 0, 0, tl.load(module + 2))
    line = arena + tl.load(module + 1).to(tl.int64) * 8 + rank.to(tl.int64)[:, None] * size + feature[None, :]
    b = tl.load(line, mask=(rank < ranks)[:, None] & inside, other=0.0)
    if GATED:
        ranks_up = tl.where(slot < 0, 0, tl.load(module + 6))
        upper = (tl.load(module + 5) - tl.load(module + 1)).to(tl.int64) * 8
        b_up = tl.load(line + upper, mask=(rank < ranks_up)[:, None] & inside, other=0.0)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    source = y + row.to(tl.int64)[:, None] * y_stride + before + feature[None, :]
    total = tl.load(source, mask=mask, other=0.0).to(tl.float32)
    if GATED:
        total_up = tl.load(source + size, mask=mask, other=0.0).to(tl.float32)
    total = _add(total, b, module, planes, row, uses, rank, ranks, split_stride, PLANE, SPLITS)
    for first in range(16, ranks, 16):
        at = first + rank
        b = tl.load(line + first * size.to(tl.int64), mask=(at < ranks)[:, None] & inside, other=0.0)
        total = _add(total, b, module, planes, row, uses, at, ranks, split_stride, PLANE, SPLITS)
    if GATED:
        total_up = _add(total_up, b_up, module + 4, planes, row, uses, rank, ranks_up, split_stride, PLANE, SPLITS)
        for first in range(16, ranks_up, 16):
            at = first + rank
            more = line + upper + first * size.to(tl.int64)
            b_up = tl.load(more, mask=(at < ranks_up)[:, None] & inside, other=0.0)
            total_up = _add(total_up, b_up, module + 4, planes, row, uses, at, ranks_up, split_stride, PLANE, SPLITS)
    if GATED:
        total = total * tl.sigmoid(total) * total_up
    target = out + row.to(tl.int64)[:, None] * out_stride + before + feature[None, :]
    tl.store(target, total.to(out.dtype.element_ty), mask=mask)


def shrink_alike(x_NI: Tensor, batch: LoraBatch, site: LoraSite) -> Tensor:
    """Return t = x A^T of the adapter that up to 64 rows use, in the form of shrink.py's `shrink`.

    Args:
        x_NI: Input in the arena's dtype, last dimension contiguous.
        batch: The adapters of the rows; the first entry has the one adapter, if a row uses it.
        site: The site of the product.
    """
    rows, modules = len(x_NI), len(site.sizes_out)
    splits = min(8, triton.cdiv(site.size_in, _SPLIT))
    planes = torch.empty(splits, rows, modules * batch.max_rank, dtype=torch.float32, device=x_NI.device)
    _shrink_alike_kernel[(splits,)](
        x_NI, batch.arena, batch.table, batch.entries_E4, planes,
        site.line, batch.table.shape[1], rows, site.size_in, x_NI.stride(0), planes.stride(0),
        MODULES=modules, PLANE=planes.shape[2], ROWS=max(16, triton.next_power_of_2(rows)),
        RANK=min(64, max(16, triton.next_power_of_2(planes.shape[2]))), BLOCK=_BLOCK_IN, SPLITS=splits,
        num_warps=4, num_stages=3,
    )  # fmt: skip
    return planes


def expand_alike(
    planes: Tensor,
    y_NO: Tensor,
    out_NO: Tensor,
    batch: LoraBatch,
    site: LoraSite,
    *,
    gated: bool = False,
    pdl: bool = False,
) -> None:
    """Compute `out = y + t B`, or with `gated` silu of its first half times its second.

    Args:
        planes: The result of `shrink_alike` for the same batch and site.
        y_NO: The product, its modules side by side; last dimension contiguous.
        out_NO: Output of the same form as `y_NO`, which it may be; half as wide with `gated`.
        batch: The adapters of the rows.
        site: The site of the product.
        gated: Whether the site is that of gate and up.
        pdl: Whether to use programmatic dependent launch; the last two kernels must not write the arena or the tables.
    """
    sizes = site.sizes_out[: 1 if gated else None]
    _expand_alike_kernel[(sum(triton.cdiv(size, _BLOCK_OUT) for size in sizes),)](
        y_NO, out_NO, batch.arena, batch.table, batch.slots_N, batch.entries_E4, planes,
        site.line, batch.table.shape[1], len(y_NO), y_NO.stride(0), out_NO.stride(0), planes.stride(0),
        *(*site.sizes_out, 0, 0)[:3],
        MODULES=len(site.sizes_out), GATED=gated, PLANE=planes.shape[2],
        ROWS=max(16, triton.next_power_of_2(len(y_NO))), BLOCK=_BLOCK_OUT, SPLITS=len(planes), PDL=pdl,
        num_warps=4, launch_pdl=pdl,
    )  # fmt: skip
