"""Norm, rotary, KV write and decode attention of few rows in one Triton kernel; never used where rows fill the GPU.

For a handful of rows attention is latency: this kernel fetches old keys and values while the product before it still
runs, so that what remains after it is one token's arithmetic. Shape letters as in `ops/paged.py`; B rows, X packed qkv.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from headrace.ops.cuda.attention.scores import factors_of, first_weights, scores_of
from headrace.ops.cuda.fused import finite
from headrace.ops.cuda.tuning.chips import DEFAULT
from headrace.ops.paged import UNSCALED, KvScales

if TYPE_CHECKING:
    from torch import Tensor

    from headrace.ops.cuda.attention.shape import HeadShape
    from headrace.ops.cuda.fused import DecodeInputs
    from headrace.ops.cuda.tuning.table import Tuning

__all__ = ["FusedDecode"]

_TILE = 32


@triton.jit
def _half(source, mask, half, norm, cos, sin, eps, DIM: tl.constexpr, NORM: tl.constexpr):
    """Return the heads at `source` (a column of pointers), normalised and rotated, as low and high float32 halves."""
    low = tl.load(source + half, mask=mask, other=0.0).to(tl.float32)
    high = tl.load(source + DIM // 2 + half, mask=mask, other=0.0).to(tl.float32)
    if NORM:
        factor = tl.rsqrt(tl.sum(low * low + high * high, axis=1) / DIM + eps)[:, None]
        low = low * factor * tl.load(norm + half).to(tl.float32)
        high = high * factor * tl.load(norm + DIM // 2 + half).to(tl.float32)
    return low * cos - high * sin, high * cos + low * sin


@triton.jit
def _tile(
    kv, pages, at, end, head_offset, page_stride, token_stride, part_stride, DIM: tl.constexpr, PAGE: tl.constexpr
):
    """Return keys (low and high halves) and values of some positions; zeros past `end`."""
    inside = at < end
    page = tl.load(pages + at // PAGE, mask=inside, other=0).to(tl.int64)
    line = kv + (page * page_stride + (at % PAGE) * token_stride + head_offset)[:, None]
    half = tl.arange(0, DIM // 2)[None, :]
    low = tl.load(line + half, mask=inside[:, None], other=0.0)
    high = tl.load(line + DIM // 2 + half, mask=inside[:, None], other=0.0)
    value = tl.load(line + part_stride + tl.arange(0, DIM)[None, :], mask=inside[:, None], other=0.0)
    return low, high, value


@triton.jit
def _fused_decode_kernel(  # noqa: PLR0915 - one kernel is one launch
    qkv,
    q_norm,
    k_norm,
    cos_sin,
    sinks,
    seq_lens,
    pages,
    kv,
    out,
    partial,
    stats,
    counters,
    qkv_stride,
    out_stride,
    columns,
    page_stride,
    part_stride,
    token_stride,
    eps,
    scale,
    cap,
    k_scale,
    v_scale,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    DIM: tl.constexpr,
    PAGE: tl.constexpr,
    TILE: tl.constexpr,
    SPLITS: tl.constexpr,
    LANES: tl.constexpr,
    WINDOW: tl.constexpr,
    NORM: tl.constexpr,
    FP8: tl.constexpr,
    CAP: tl.constexpr,
    SINKS: tl.constexpr,
    PDL: tl.constexpr,
):
    kv_head = tl.program_id(0)
    split = tl.program_id(1)
    row = tl.program_id(2)
    length = tl.load(seq_lens + row).to(tl.int32)
    oldest = 0
    if WINDOW > 0:
        oldest = tl.maximum(length - WINDOW, 0)
    origin = (oldest // TILE) * TILE
    tiles = tl.cdiv(length - origin, TILE)
    each = tl.cdiv(tiles, SPLITS)
    active = tl.cdiv(tiles, each)
    start = origin + split * each * TILE
    if split < active:
        end = tl.minimum(start + each * TILE, length)
        row_pages = pages + row.to(tl.int64) * columns
        head_offset = kv_head * DIM
        at = start + tl.arange(0, TILE)
        # The new token's own slot is still stale here; it is replaced below.
        low, high, value = _tile(kv, row_pages, at, end, head_offset, page_stride, token_stride, part_stride, DIM, PAGE)
        half = tl.arange(0, DIM // 2)[None, :]
        angle = cos_sin + (length - 1).to(tl.int64) * DIM + half
        cos = tl.load(angle)
        sin = tl.load(angle + DIM // 2)
        if PDL:
            gdc_launch_dependents()
            gdc_wait()
        lane = tl.arange(0, LANES)[:, None]
        packed = qkv + row.to(tl.int64) * qkv_stride
        q_low, q_high = _half(
            packed + (kv_head * GROUP + lane) * DIM,
            (lane < GROUP) & (half >= 0),
            half,
            q_norm,
            cos,
            sin,
            eps,
            DIM,
            NORM,
        )
        single = tl.arange(0, 1)[:, None]
        heads = KV_HEADS * GROUP
        new_low, new_high = _half(
            packed + (heads + kv_head + single) * DIM,
            (single == 0) & (half >= 0),
            half,
            k_norm,
            cos,
            sin,
            eps,
            DIM,
            NORM,
        )
        all_dims = tl.arange(0, DIM)[None, :]
        new_value = tl.load(packed + (heads + KV_HEADS + kv_head) * DIM + all_dims).to(tl.float32)
        if FP8:
            new_low = tl.clamp(new_low / k_scale, -448.0, 448.0)
            new_high = tl.clamp(new_high / k_scale, -448.0, 448.0)
            new_value = tl.clamp(new_value / v_scale, -448.0, 448.0)
        new_low = finite(new_low).to(kv.dtype.element_ty)
        new_high = finite(new_high).to(kv.dtype.element_ty)
        new_value = finite(new_value).to(kv.dtype.element_ty)
        if split == active - 1:
            page = tl.load(row_pages + (length - 1) // PAGE).to(tl.int64)
            target = kv + page * page_stride + ((length - 1) % PAGE) * token_stride + head_offset
            tl.store(target + half, new_low)
            tl.store(target + DIM // 2 + half, new_high)
            tl.store(target + part_stride + all_dims, new_value)
        kind = qkv.dtype.element_ty
        q_low = q_low.to(kind)
        q_high = q_high.to(kind)
        number = tl.arange(0, LANES)
        has_sinks = (number < GROUP) & (split == 0)
        most, total = first_weights(sinks + kv_head * GROUP, number, has_sinks, LANES, SINKS)
        summed = tl.zeros([LANES, DIM], tl.float32)
        for begin in range(start, end, TILE):
            at = begin + tl.arange(0, TILE)
            newest = (at == length - 1)[:, None]
            k_low = tl.where(newest, new_low, low).to(kind)
            k_high = tl.where(newest, new_high, high).to(kind)
            v = tl.where(newest, new_value, value).to(kind)
            low, high, value = _tile(
                kv, row_pages, at + TILE, end, head_offset, page_stride, token_stride, part_stride, DIM, PAGE
            )
            scores = tl.dot(q_low, tl.trans(k_low)) + tl.dot(q_high, tl.trans(k_high))
            scores = tl.where(((at < end) & (at >= oldest))[None, :], scores_of(scores, scale, cap, CAP), float("-inf"))
            higher = tl.maximum(most, tl.max(scores, axis=1))
            ratio = tl.exp2(most - higher)
            weight = tl.exp2(scores - higher[:, None])
            total = total * ratio + tl.sum(weight, axis=1)
            summed = summed * ratio[:, None] + tl.dot(weight.to(kind), v)
            most = higher
        place = out + row.to(tl.int64) * out_stride + kv_head * GROUP * DIM
        if active == 1:
            result = summed / total[:, None] * v_scale
            tl.store(
                place + lane * DIM + all_dims, result.to(out.dtype.element_ty), mask=(lane < GROUP) & (all_dims >= 0)
            )
        else:
            team = (row * KV_HEADS + kv_head) * SPLITS
            line = tl.arange(0, LANES)
            tl.store(
                partial + ((team + split) * GROUP + lane) * DIM + all_dims,
                summed,
                mask=(lane < GROUP) & (all_dims >= 0),
            )
            tl.store(stats + ((team + split) * GROUP + line) * 2, most, mask=line < GROUP)
            tl.store(stats + ((team + split) * GROUP + line) * 2 + 1, total, mask=line < GROUP)
            tl.debug_barrier()
            arrived = tl.atomic_add(counters + row * KV_HEADS + kv_head, 1, sem="acq_rel", scope="gpu")
            if arrived == active - 1:
                other = tl.arange(0, SPLITS)
                there = other < active
                for member in tl.static_range(GROUP):
                    spot = (team + other) * GROUP + member
                    peak = tl.load(stats + spot * 2, mask=there, other=float("-inf"), cache_modifier=".cg")
                    mass = tl.load(stats + spot * 2 + 1, mask=there, other=0.0, cache_modifier=".cg")
                    parts = tl.load(
                        partial + spot[:, None] * DIM + all_dims,
                        mask=there[:, None] & (all_dims >= 0),
                        other=0.0,
                        cache_modifier=".cg",
                    )
                    factor = tl.exp2(peak - tl.max(peak, axis=0))
                    result = tl.sum(parts * factor[:, None], axis=0) / tl.sum(mass * factor, axis=0) * v_scale
                    tl.store(place + member * DIM + tl.arange(0, DIM), result.to(out.dtype.element_ty))
                tl.store(counters + row * KV_HEADS + kv_head, 0)


class FusedDecode:
    """Decodes of a few rows: q/k norm, rotary, KV write, attention. No plan: splits follow the device's lengths."""

    def __init__(
        self,
        shape: HeadShape,
        device: torch.device,
        *,
        max_rows: int,
        tuning: Tuning = DEFAULT,
        splits: int | None = None,
        tile: int = _TILE,
        warps: int = 4,
    ) -> None:
        """Allocate for `max_rows`; `splits` (a power of two, None picks it) bounds the programs for a row and head."""
        if splits is None:
            programs = tuning.fused_programs // (max_rows * shape.kv_heads)
            splits = max(1, min(tuning.fused_splits, triton.next_power_of_2(programs)))
        self._shape, self._splits, self._tile, self._warps = shape, splits, tile, warps
        teams = max_rows * shape.heads * splits
        self._partial = torch.empty(teams, shape.head_dim, dtype=torch.float32, device=device)
        self._stats = torch.empty(teams, 2, dtype=torch.float32, device=device)
        self._counters = torch.zeros(max_rows * shape.kv_heads, dtype=torch.int32, device=device)

    def run(
        self,
        qkv_BX: Tensor,
        q_norm_D: Tensor | None,
        k_norm_D: Tensor | None,
        cos_sin_PD: Tensor,
        kv_layer: Tensor,
        inputs: DecodeInputs,
        out_BX: Tensor,
        scales: KvScales = UNSCALED,
        sinks_H: Tensor | None = None,
        *,
        eps: float,
        pdl: bool = False,
    ) -> None:
        """Enqueue one layer; the arguments are those of `heads.norm_rope_write`, and `out_BX` is `[B, H * D]`.

        kernels.py declares what is read before the wait with `pdl`. Head sizes 64, 128, 256.
        """
        shape = self._shape
        group = shape.heads // shape.kv_heads
        scale, cap = factors_of(shape, scales)
        _fused_decode_kernel[(shape.kv_heads, self._splits, qkv_BX.shape[0])](
            qkv_BX, q_norm_D, k_norm_D, cos_sin_PD, qkv_BX if sinks_H is None else sinks_H, inputs.seq_lens_B,
            inputs.pages_BP, kv_layer, out_BX, self._partial, self._stats, self._counters, qkv_BX.stride(0),
            out_BX.stride(0), inputs.pages_BP.shape[1], kv_layer.stride(0), kv_layer.stride(1), kv_layer.stride(2),
            eps, scale, cap, scales.k, scales.v,
            KV_HEADS=shape.kv_heads, GROUP=group, DIM=shape.head_dim, PAGE=shape.page_size, TILE=self._tile,
            SPLITS=self._splits, LANES=max(16, triton.next_power_of_2(group)), WINDOW=shape.window or 0,
            NORM=q_norm_D is not None, FP8=shape.kv_dtype == torch.float8_e4m3fn, CAP=shape.cap is not None,
            SINKS=sinks_H is not None, PDL=pdl, num_warps=self._warps, launch_pdl=pdl,
        )  # fmt: skip
