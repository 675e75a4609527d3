"""The small operations of a decoder step on CUDA, one Triton kernel each; never allocates, and never chooses tokens.

Every function writes into tensors of the caller, runs on the current stream and can be captured in a CUDA graph. With
`pdl=True` (sm_90 and newer) a kernel may be scheduled while its predecessor drains; before it touches memory that
another kernel writes, it waits for that kernel to finish.

Shape letters as in `ops/paged.py`; B rows of a captured batch, C tokens of a row's pool, X a token's packed q, k and v.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

if TYPE_CHECKING:
    from torch import Tensor

    from headrace.ops.stream import Activation

__all__ = [
    "DecodeInputs", "activate_mul", "add_rms_norm", "finite", "norm_rope_write", "prepare_decode", "rms_norm",
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
def _norm_rope_kernel(
    qkv,
    q_out,
    q_norm,
    k_norm,
    cos_sin,
    positions,
    slots,
    kv,
    qkv_stride,
    q_stride,
    page_stride,
    part_stride,
    token_stride,
    eps,
    k_scale,
    v_scale,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HALF: tl.constexpr,
    HALF_BLOCK: tl.constexpr,
    GROUP: tl.constexpr,
    PAGE: tl.constexpr,
    NORM: tl.constexpr,
    FP8: tl.constexpr,
    PDL: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    first_head = tl.program_id(1) * GROUP
    head = tl.arange(0, GROUP)[:, None]
    at = tl.arange(0, HALF_BLOCK)[None, :]
    inside = at < HALF
    is_q = first_head < HEADS
    is_k = (first_head >= HEADS) & (first_head < HEADS + KV_HEADS)
    if NORM:  # weights: no earlier kernel writes them
        norm = tl.where(is_q, q_norm, k_norm)
        norm_low = tl.load(norm + at, mask=inside, other=0.0).to(tl.float32)
        norm_high = tl.load(norm + HALF + at, mask=inside, other=0.0).to(tl.float32)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    source = qkv + token * qkv_stride + (first_head + head) * (2 * HALF) + at
    mask = inside & (head < GROUP)
    low = tl.load(source, mask=mask, other=0.0).to(tl.float32)
    high = tl.load(source + HALF, mask=mask, other=0.0).to(tl.float32)
    if is_q | is_k:
        if NORM:
            square = tl.sum(low * low + high * high, axis=1)[:, None]
            factor = tl.rsqrt(square / (2 * HALF) + eps)
            low = low * factor * norm_low
            high = high * factor * norm_high
        position = tl.load(positions + token).to(tl.int64)
        cos = tl.load(cos_sin + position * (2 * HALF) + at, mask=inside, other=0.0)
        sin = tl.load(cos_sin + position * (2 * HALF) + HALF + at, mask=inside, other=0.0)
        turned = low * cos - high * sin
        high = high * cos + low * sin
        low = turned
    if is_q:
        target = q_out + token * q_stride + (first_head + head) * (2 * HALF) + at
        tl.store(target, low.to(q_out.dtype.element_ty), mask=mask)
        tl.store(target + HALF, high.to(q_out.dtype.element_ty), mask=mask)
    else:
        slot = tl.load(slots + token)
        if slot >= 0:
            kv_head = first_head - tl.where(is_k, HEADS, HEADS + KV_HEADS) + head
            part = tl.where(is_k, 0, part_stride)
            place = (slot // PAGE) * page_stride + part + (slot % PAGE) * token_stride
            target = kv + place + kv_head * (2 * HALF) + at
            if FP8:
                scale = tl.where(is_k, k_scale, v_scale)
                low = tl.clamp(low / scale, -448.0, 448.0)
                high = tl.clamp(high / scale, -448.0, 448.0)
            tl.store(target, finite(low).to(kv.dtype.element_ty), mask=mask)
            tl.store(target + HALF, finite(high).to(kv.dtype.element_ty), mask=mask)


def norm_rope_write(
    qkv_NX: Tensor,
    q_norm_D: Tensor | None,
    k_norm_D: Tensor | None,
    cos_sin_PD: Tensor,
    positions_N: Tensor,
    slots_N: Tensor,
    kv_layer: Tensor,
    *,
    heads: int,
    kv_heads: int,
    eps: float,
    q_out: Tensor | None = None,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
    pdl: bool = False,
) -> None:
    """Normalise queries and keys (if weights are given), rotate them, and store keys and values in their pages.

    Args:
        qkv_NX: Packed queries, keys and values, bf16 or fp16 `[N, (H + 2K) * D]`, last dimension contiguous.
        q_norm_D: RMS norm weight of query heads, or None; given together with `k_norm_D`.
        k_norm_D: RMS norm weight of key heads, or None.
        cos_sin_PD: Rotary table, float32 `[positions, D]`: D/2 cosines, then D/2 sines.
        positions_N: Position of each token, int32 or int64.
        slots_N: Place of each key and value, int64: page * page_size + offset; -1 stores nothing.
        kv_layer: Paged cache of the layer, `[pages, 2, T, K, D]`, of qkv's dtype or float8_e4m3fn.
        heads: Number of query heads.
        kv_heads: Number of key/value heads.
        eps: Epsilon of the norms.
        q_out: Output for queries, `[N, H, D]` or `[N, H * D]`, last dimensions contiguous; None: in place in `qkv_NX`.
        k_scale: Factor of stored keys when they are read from an fp8 cache.
        v_scale: Factor of stored values when they are read from an fp8 cache.
        pdl: Whether to use programmatic dependent launch.
    """
    dim = cos_sin_PD.shape[1]
    target = qkv_NX if q_out is None else q_out
    group = _head_group(heads, kv_heads, qkv_NX.shape[0])
    grid = (qkv_NX.shape[0], (heads + 2 * kv_heads) // group)
    # fmt: off
    _norm_rope_kernel[grid](
        qkv_NX, target, q_norm_D, k_norm_D, cos_sin_PD, positions_N, slots_N, kv_layer,
        qkv_NX.stride(0), target.stride(0), kv_layer.stride(0), kv_layer.stride(1), kv_layer.stride(2),
        eps, k_scale, v_scale,
        HEADS=heads, KV_HEADS=kv_heads, HALF=dim // 2, HALF_BLOCK=triton.next_power_of_2(dim // 2), GROUP=group,
        PAGE=kv_layer.shape[2], NORM=q_norm_D is not None, FP8=kv_layer.dtype == torch.float8_e4m3fn, PDL=pdl,
        num_warps=max(1, min(4, group * dim // 256)), launch_pdl=pdl,
    )
    # fmt: on


def _head_group(heads: int, kv_heads: int, tokens: int) -> int:
    """Return the heads of one program, a power of two that divides both counts; fewer where few tokens fill the GPU."""
    most = 8 if tokens > 64 else 2
    group = 1
    while group < most and heads % (2 * group) == 0 and kv_heads % (2 * group) == 0:
        group *= 2
    return group


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
