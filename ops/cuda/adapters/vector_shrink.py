"""Computes one row's product on CUDA (Triton) together with its low-rank adapter's x A^T; never used for more rows.

To a program a row of A is one more row of the weight, so the work of `shrink` takes no launch of its own. Weights
stream while the kernel before still runs, as in products/vector.py. Letters as in rows.py.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from headrace.ops.cuda.adapters.rows import LoraBatch, LoraSite

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["vector_linear_shrink"]

_BLOCK_IN = 4096


@triton.jit
def _dots(
    x,
    source,
    feature,
    known,
    size_in,
    BLOCK_OUT: tl.constexpr,
    BLOCK_IN: tl.constexpr,
    STEPS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Return the products of x and some of the `known` lines at `source`."""
    real = (feature < known)[:, None]
    inner = tl.arange(0, BLOCK_IN)
    line = source + feature.to(tl.int64)[:, None] * size_in + inner[None, :]
    w = tl.load(line, mask=real & (inner < size_in)[None, :], other=0.0)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    total = tl.zeros([BLOCK_OUT], tl.float32)
    for step in tl.static_range(STEPS):
        at = step * BLOCK_IN + inner
        if step + 1 < STEPS:
            following = (at + BLOCK_IN < size_in)[None, :]
            w_next = tl.load(line + (step + 1) * BLOCK_IN, mask=real & following, other=0.0)
        value = tl.load(x + at, mask=at < size_in, other=0.0).to(tl.float32)
        total += tl.sum(w.to(tl.float32) * value[None, :], axis=1)
        if step + 1 < STEPS:
            w = w_next
    return total


@triton.jit(do_not_specialize=["index"])
def _vector_shrink_kernel(
    x,
    weight,
    out,
    arena,
    table,
    slots,
    planes,
    index,
    modules,
    size_out,
    size_in,
    MODULES: tl.constexpr,
    LOW: tl.constexpr,
    BLOCK_OUT: tl.constexpr,
    BLOCK_IN: tl.constexpr,
    STEPS: tl.constexpr,
    PDL: tl.constexpr,
):
    program = tl.program_id(0)
    feature = program * BLOCK_OUT + tl.arange(0, BLOCK_OUT)
    if program < LOW:  # programs for A come first, because they have more to look up
        slot = tl.load(slots)
        module = table + (tl.maximum(slot, 0) * modules + index) * 4
        last = module + (MODULES - 1) * 4
        ranks = tl.where(slot < 0, 0, tl.load(last + 2) + tl.load(last + 3))
        a = arena + tl.load(module).to(tl.int64) * 8
        low = _dots(x, a, feature, ranks, size_in, BLOCK_OUT, BLOCK_IN, STEPS, PDL)
        tl.store(planes + feature, low, mask=feature < ranks)
    else:
        feature -= LOW * BLOCK_OUT
        total = _dots(x, weight, feature, size_out, size_in, BLOCK_OUT, BLOCK_IN, STEPS, PDL)
        tl.store(out + feature, total.to(out.dtype.element_ty), mask=feature < size_out)


def vector_linear_shrink(
    x_1I: Tensor, weight_OI: Tensor, out_1O: Tensor, batch: LoraBatch, site: LoraSite, *, pdl: bool = False
) -> Tensor:
    """Compute `out = x W^T`, and return t = x A^T of the row's adapter in the form of shrink.py's `shrink`.

    Args:
        x_1I: Input, bf16 or fp16, contiguous.
        weight_OI: Weight in the same dtype, contiguous.
        out_1O: Output in the same dtype, contiguous; must not overlap the input.
        batch: The adapter of the row.
        site: The site of the product.
        pdl: Whether to use programmatic dependent launch; the last two kernels must not write weights, arena or tables.
    """
    size_out, size_in = weight_OI.shape
    modules = len(site.sizes_out)
    planes = torch.empty(1, 1, modules * batch.max_rank, dtype=torch.float32, device=batch.arena.device)
    block_in = min(_BLOCK_IN, triton.next_power_of_2(size_in))
    block_out = 8 if block_in <= 1024 else 1
    low = triton.cdiv(planes.shape[2], block_out)
    _vector_shrink_kernel[(low + triton.cdiv(size_out, block_out),)](
        x_1I, weight_OI, out_1O, batch.arena, batch.table, batch.slots_N, planes,
        site.line, batch.table.shape[1], size_out, size_in,
        MODULES=modules, LOW=low, BLOCK_OUT=block_out, BLOCK_IN=block_in, STEPS=triton.cdiv(size_in, block_in), PDL=pdl,
        num_warps=8 if block_in > 2048 else 4, launch_pdl=pdl,
    )  # fmt: skip
    return planes
