"""`norm_rope_write`: norms and rotates heads of queries and keys, and stores keys and values, in one launch (Triton).

Shape letters as in `ops/paged.py`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from headrace.ops.cuda.fused import finite

if TYPE_CHECKING:
    from torch import Tensor

    from headrace.ops.cuda.attention.shape import Values

__all__ = ["norm_rope_write"]


@triton.jit
def _norm_rope_kernel(  # noqa: PLR0915 - one kernel is one launch
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
    NORM_VALUES: tl.constexpr,
    KEYS_ARE_VALUES: tl.constexpr,
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
    source_head = first_head
    if KEYS_ARE_VALUES:
        source_head = tl.where(is_q | is_k, first_head, first_head - KV_HEADS)
    source = qkv + token * qkv_stride + (source_head + head) * (2 * HALF) + at
    mask = inside & (head < GROUP)
    low = tl.load(source, mask=mask, other=0.0).to(tl.float32)
    high = tl.load(source + HALF, mask=mask, other=0.0).to(tl.float32)
    if NORM:
        is_normed = is_q | is_k
        if NORM_VALUES:
            is_normed = first_head >= 0
        if is_normed:
            factor = tl.rsqrt(tl.sum(low * low + high * high, axis=1)[:, None] / (2 * HALF) + eps)
            low = low * factor
            high = high * factor
    if is_q | is_k:
        if NORM:
            low = low * norm_low
            high = high * norm_high
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
    values: Values = "products",
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
        values: Where the values come from. Without "products" there have to be norms; with "normed keys" `qkv_NX` has
            queries and keys alone, and with "stored" queries alone, so that nothing is stored.
        pdl: Whether to use programmatic dependent launch.
    """
    dim = cos_sin_PD.shape[1]
    target = qkv_NX if q_out is None else q_out
    kv_heads = 0 if values == "stored" else kv_heads
    group = _head_group(heads, kv_heads, qkv_NX.shape[0])
    grid = (qkv_NX.shape[0], (heads + 2 * kv_heads) // group)
    # fmt: off
    _norm_rope_kernel[grid](
        qkv_NX, target, q_norm_D, k_norm_D, cos_sin_PD, positions_N, slots_N, kv_layer,
        qkv_NX.stride(0), target.stride(0), kv_layer.stride(0), kv_layer.stride(1), kv_layer.stride(2),
        eps, k_scale, v_scale,
        HEADS=heads, KV_HEADS=kv_heads, HALF=dim // 2, HALF_BLOCK=triton.next_power_of_2(dim // 2), GROUP=group,
        PAGE=kv_layer.shape[2], NORM=q_norm_D is not None, NORM_VALUES=values.startswith("normed"),
        KEYS_ARE_VALUES=values == "normed keys", FP8=kv_layer.dtype == torch.float8_e4m3fn, PDL=pdl,
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
