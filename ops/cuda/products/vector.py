"""Products of one to eight rows on CUDA (Triton), with the norm before and the activation after in the same kernel.

Never used for more rows: without tensor cores its arithmetic grows with them. Such a product takes as long as reading
its weight, so a program loads its weights before it waits for the kernel that makes its input (programmatic dependent
launch): weights stream while the previous kernel still runs. I input features, O output features, N rows.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

if TYPE_CHECKING:
    from torch import Tensor

    from headrace.ops.cuda.products.fusion import AddNorm

__all__ = ["MAX_ROWS", "vector_linear"]

MAX_ROWS = 8
_BLOCK_IN = 4096


@triton.jit
def _vector_kernel(  # noqa: C901 - one kernel is one launch
    x,
    residual,
    norm,
    residual_out,
    weight,
    out,
    size_out,
    size_in,
    x_stride,
    residual_stride,
    out_stride,
    eps,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    BLOCK_OUT: tl.constexpr,
    BLOCK_IN: tl.constexpr,
    STEPS: tl.constexpr,
    NORM: tl.constexpr,
    ADD: tl.constexpr,
    GATED: tl.constexpr,
    PDL: tl.constexpr,
):
    feature = tl.program_id(0) * BLOCK_OUT + tl.arange(0, BLOCK_OUT)
    inner = tl.arange(0, BLOCK_IN)
    line = weight + tl.minimum(feature, size_out - 1).to(tl.int64)[:, None] * size_in + inner[None, :]
    upper = line + size_out.to(tl.int64) * size_in
    inside = inner < size_in
    w = tl.load(line, mask=inside[None, :], other=0.0)
    if GATED:
        up = tl.load(upper, mask=inside[None, :], other=0.0)
    if NORM:
        scale = tl.load(norm + inner, mask=inside, other=0.0).to(tl.float32)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    column = tl.arange(0, COLUMNS)[None, :]
    total = tl.zeros([BLOCK_OUT, COLUMNS], tl.float32)
    total_up = tl.zeros([BLOCK_OUT, COLUMNS], tl.float32)
    for step in tl.static_range(STEPS):
        inside = step * BLOCK_IN + inner < size_in
        if step + 1 < STEPS:
            after = (step + 1) * BLOCK_IN
            w_next = tl.load(line + after, mask=(after + inner < size_in)[None, :], other=0.0)
            if GATED:
                up_next = tl.load(upper + after, mask=(after + inner < size_in)[None, :], other=0.0)
        for row in tl.static_range(ROWS):
            value = tl.load(x + row * x_stride + step * BLOCK_IN + inner, mask=inside, other=0.0).to(tl.float32)
            if ADD:
                value += tl.load(residual + row * residual_stride + inner, mask=inside, other=0.0).to(tl.float32)
                if tl.program_id(0) == 0:
                    kept = value.to(residual_out.dtype.element_ty)
                    tl.store(residual_out + row * residual_stride + inner, kept, mask=inside)
            if NORM:
                value = value * tl.rsqrt(tl.sum(value * value, axis=0) / size_in + eps) * scale
                value = value.to(x.dtype.element_ty).to(tl.float32)
            dots = tl.sum(w.to(tl.float32) * value[None, :], axis=1)
            total += tl.where(column == row, dots[:, None], 0.0)
            if GATED:
                dots = tl.sum(up.to(tl.float32) * value[None, :], axis=1)
                total_up += tl.where(column == row, dots[:, None], 0.0)
        if step + 1 < STEPS:
            w = w_next
            if GATED:
                up = up_next
    if GATED:
        total = total * tl.sigmoid(total) * total_up
    target = out + column * out_stride + feature[:, None]
    tl.store(target, total.to(out.dtype.element_ty), mask=(feature < size_out)[:, None] & (column < ROWS))


def vector_linear(
    x_NI: Tensor,
    weight_OI: Tensor,
    out_NO: Tensor,
    *,
    norm: AddNorm | None = None,
    gated: bool = False,
    pdl: bool = False,
    block_out: int | None = None,
    warps: int | None = None,
) -> None:
    """Compute `out = f(x) W^T` for at most `MAX_ROWS` rows, accumulated in float32; f is `norm`, or nothing.

    Args:
        x_NI: Input, bf16 or fp16, last dimension contiguous.
        weight_OI: Weight in the same dtype, contiguous. With `gated`, O gate rows, then O up rows.
        out_NO: Output in any float dtype, last dimension contiguous; must not overlap the input.
        norm: Add and norm of the input; I at most 4096.
        gated: Whether to compute `out = silu(gate) * up`.
        pdl: Whether to use programmatic dependent launch; kernels.py declares what is then read before the wait.
        block_out: Output features of a program, a power of two; None picks.
        warps: Warps of a program; None picks.

    Raises:
        ValueError: Too many rows, or a norm over more than 4096 features.
    """
    rows, size_in = x_NI.shape
    size_out = weight_OI.shape[0] // 2 if gated else weight_OI.shape[0]
    block_in = min(_BLOCK_IN, triton.next_power_of_2(size_in))
    if rows > MAX_ROWS or (norm is not None and size_in > block_in):
        raise ValueError(f"{rows} rows of {size_in} features: at most {MAX_ROWS}, and {_BLOCK_IN} with a norm")
    if block_out is None:
        block_out = (4 if gated else 8) if block_in <= 1024 else 1
    if warps is None:
        warps = 8 if gated or block_in > 2048 else 4
    add = norm is not None and norm.residual is not None
    residual = norm.residual if norm is not None and norm.residual is not None else x_NI
    kept = norm.residual_out if norm is not None and norm.residual_out is not None else residual
    # fmt: off
    _vector_kernel[(triton.cdiv(size_out, block_out),)](
        x_NI, residual, weight_OI if norm is None else norm.weight, kept, weight_OI, out_NO, size_out, size_in,
        x_NI.stride(0), residual.stride(0), out_NO.stride(0), 0.0 if norm is None else norm.eps,
        ROWS=rows, COLUMNS=triton.next_power_of_2(rows), BLOCK_OUT=block_out, BLOCK_IN=block_in,
        STEPS=triton.cdiv(size_in, block_in), NORM=norm is not None, ADD=add, GATED=gated, PDL=pdl,
        num_warps=warps, launch_pdl=pdl,
    )
    # fmt: on
