"""The small operations of a decoder step on CUDA, one Triton kernel each; never allocates, and never chooses tokens.

Every function writes into tensors of the caller, runs on the current stream and can be captured in a CUDA graph. With
`pdl=True` (sm_90 and newer) a kernel may be scheduled while its predecessor drains; before it touches memory that
another kernel writes, it waits for that kernel to finish.

Shape letters as in `ops/paged.py`; B rows of a captured batch, C tokens of a row's pool, X a token's packed q, k and v.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

if TYPE_CHECKING:
    from torch import Tensor

    from headrace.ops.stream import Activation

__all__ = [
    "DecodeInputs", "activate_mul", "add_rms_norm", "finite", "prepare_decode", "rms_norm",
]  # fmt: skip

_COPY_BLOCK = 1024


@dataclass(frozen=True, slots=True, eq=False)
class DecodeInputs:
    """Inputs of one decode step of B rows, derived on the device by `prepare_decode`; the caller owns the tensors."""

    tokens_B: Tensor
    """Token that each row computes, int32 or int64."""
    positions_B: Tensor
    """Position of the token in its own sequence, int32 or int64."""
    slots_B: Tensor
    """Place of the token's key and value, int64: page * page_size + offset."""
    seq_lens_B: Tensor
    """Context length, this token included, int32 or uint32."""
    pages_BP: Tensor
    """Page numbers of each row, int32, contiguous; columns past a length stay: fill them with valid page numbers."""
    tails_B: Tensor
    """Tail for `attention.paged.PlannedDecode`, int32: `seq_lens - (P - 1) * page_size`, negative for most rows."""


@triton.jit
def _prepare_kernel(
    rows,
    pool,
    lengths,
    table,
    tokens,
    positions,
    slots,
    seq_lens,
    pages,
    tails,
    pool_stride,
    table_stride,
    columns,
    context,
    PAGE: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    at = tl.program_id(0)
    block = tl.program_id(1)
    row = tl.load(rows + at).to(tl.int64)
    position = tl.minimum(tl.load(lengths + row), context - 1)
    if block == 0:
        page = tl.load(table + row * table_stride + position // PAGE).to(tl.int64)
        tl.store(tokens + at, tl.load(pool + row * pool_stride + position))
        tl.store(positions + at, position)
        tl.store(slots + at, page * PAGE + position % PAGE)
        tl.store(seq_lens + at, position + 1)
        tl.store(tails + at, position + 1 - (columns - 1) * PAGE)
    if block * BLOCK * PAGE <= position:
        column = block * BLOCK + tl.arange(0, BLOCK)
        used = (column < columns) & (column * PAGE <= position)
        numbers = tl.load(table + row * table_stride + column, mask=used, other=0)
        tl.store(pages + at.to(tl.int64) * columns + column, numbers, mask=used)


def prepare_decode(
    rows_B: Tensor,
    pool_RC: Tensor,
    lengths_R: Tensor,
    table_RP: Tensor,
    out: DecodeInputs,
    *,
    page_size: int,
    pdl: bool = False,
) -> None:
    """Derive a decode step's inputs from the state on the device.

    Args:
        rows_B: Row numbers, int32; padding is the dummy row, whose length stays 0.
        pool_RC: Tokens of each row, int32.
        lengths_R: Number of tokens of each row whose keys and values are written, int32.
        table_RP: Page numbers of each row, int32.
        out: Inputs to write; `pages_BP` may have fewer columns than `table_RP` where contexts are known to fit.
        page_size: Tokens in a page.
        pdl: Whether to use programmatic dependent launch.
    """
    columns = out.pages_BP.shape[1]
    grid = (rows_B.shape[0], triton.cdiv(columns, _COPY_BLOCK))
    _prepare_kernel[grid](
        rows_B,
        pool_RC,
        lengths_R,
        table_RP,
        out.tokens_B,
        out.positions_B,
        out.slots_B,
        out.seq_lens_B,
        out.pages_BP,
        out.tails_B,
        pool_RC.stride(0),
        table_RP.stride(0),
        columns,
        columns * page_size,
        PAGE=page_size,
        BLOCK=min(_COPY_BLOCK, triton.next_power_of_2(columns)),
        PDL=pdl,
        num_warps=4,
        launch_pdl=pdl,
    )


@triton.jit
def finite(x):
    """Return x, or 0 where bf16 could not hold it: a failed row's values in a page must not reach its next user."""
    return tl.where(tl.abs(x) < 3.38e38, x, 0.0)


@triton.jit
def _rms_norm_kernel(
    x,
    residual,
    weight,
    out,
    x_stride,
    residual_stride,
    out_stride,
    size,
    eps,
    BLOCK: tl.constexpr,
    ADD: tl.constexpr,
    PDL: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    inside = at < size
    scale = tl.load(weight + at, mask=inside, other=0.0).to(tl.float32)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    value = tl.load(x + row * x_stride + at, mask=inside, other=0.0).to(tl.float32)
    if ADD:
        value += tl.load(residual + row * residual_stride + at, mask=inside, other=0.0).to(tl.float32)
        tl.store(residual + row * residual_stride + at, value.to(residual.dtype.element_ty), mask=inside)
    factor = tl.rsqrt(tl.sum(value * value, axis=0) / size + eps)
    tl.store(out + row * out_stride + at, (value * factor * scale).to(out.dtype.element_ty), mask=inside)


def _warps(size: int) -> int:
    return 4 if size <= 2048 else 8 if size <= 8192 else 16


def rms_norm(x_NE: Tensor, weight_E: Tensor, eps: float, out: Tensor, *, pdl: bool = False) -> None:
    """Compute `out = x / rms(x) * weight` over the last dimension, in float32 inside; `out` may be `x_NE`."""
    size = x_NE.shape[1]
    _rms_norm_kernel[(x_NE.shape[0],)](
        x_NE,
        x_NE,
        weight_E,
        out,
        x_NE.stride(0),
        0,
        out.stride(0),
        size,
        eps,
        BLOCK=triton.next_power_of_2(size),
        ADD=False,
        PDL=pdl,
        num_warps=_warps(size),
        launch_pdl=pdl,
    )


def add_rms_norm(
    x_NE: Tensor, residual_NE: Tensor, weight_E: Tensor, eps: float, out: Tensor | None = None, *, pdl: bool = False
) -> None:
    """Compute `residual += x`, then `out = residual / rms(residual) * weight`; None writes the norm into `x_NE`.

    The norm is taken of the float32 sum, before it is rounded to the residual's dtype.
    """
    size, target = x_NE.shape[1], x_NE if out is None else out
    _rms_norm_kernel[(x_NE.shape[0],)](
        x_NE,
        residual_NE,
        weight_E,
        target,
        x_NE.stride(0),
        residual_NE.stride(0),
        target.stride(0),
        size,
        eps,
        BLOCK=triton.next_power_of_2(size),
        ADD=True,
        PDL=pdl,
        num_warps=_warps(size),
        launch_pdl=pdl,
    )


@triton.jit
def _activate_mul_kernel(
    gate_up, out, in_stride, out_stride, size, GELU: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr
):
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < size
    gate = tl.load(gate_up + row * in_stride + at, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * in_stride + size + at, mask=inside, other=0.0).to(tl.float32)
    inner = gate
    if GELU:  # (1 + tanh(z)) / 2 is sigmoid(2 z), with z = sqrt(2 / pi) (x + 0.044715 x^3)
        inner = 1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)
    tl.store(out + row * out_stride + at, (gate * tl.sigmoid(inner) * up).to(out.dtype.element_ty), mask=inside)


def activate_mul(gate_up_N2F: Tensor, out: Tensor, activation: Activation = "silu", *, pdl: bool = False) -> None:
    """Compute `out = activation(gate) * up`, where each token of `gate_up_N2F` holds F gates, then F ups."""
    size = out.shape[1]
    block = 1024
    _activate_mul_kernel[(out.shape[0], triton.cdiv(size, block))](
        gate_up_N2F,
        out,
        gate_up_N2F.stride(0),
        out.stride(0),
        size,
        GELU=activation == "gelu_tanh",
        BLOCK=block,
        PDL=pdl,
        num_warps=4,
        launch_pdl=pdl,
    )
