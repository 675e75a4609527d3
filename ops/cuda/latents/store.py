"""`store_latents`: rotates queries and the key that all heads share, norms latent vectors, and fills their pages.

One Triton kernel, which allocates nothing, runs on the current stream and can be captured in a CUDA graph. Shape
letters as in `ops/latents.py`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from headrace.ops.cuda.fused import finite

if TYPE_CHECKING:
    from torch import Tensor

    from headrace.ops.cuda.latents.shape import LatentShape

__all__ = ["store_latents"]

_GROUP = 8
"""Heads of a program."""


@triton.jit
def _rotated(source, mask, at, cos, sin, HALF: tl.constexpr, PAIRED: tl.constexpr):
    """Return the halves, float32, into which the elements at `source` are rotated."""
    if PAIRED:
        first, second = 2 * at, 2 * at + 1
    else:
        first, second = at, at + HALF
    low = tl.load(source + first, mask=mask, other=0.0).to(tl.float32)
    high = tl.load(source + second, mask=mask, other=0.0).to(tl.float32)
    return low * cos - high * sin, high * cos + low * sin


@triton.jit
def _store_latents_kernel(
    given, latents, norm, cos_sin, positions, slots, out, kv, lines,
    given_stride, head_stride, out_stride, out_head_stride, latent_stride, page_stride, eps,
    HEADS: tl.constexpr, GROUP: tl.constexpr, LATENT: tl.constexpr, BLOCK: tl.constexpr, HALF: tl.constexpr,
    HALF_BLOCK: tl.constexpr, PAIRED: tl.constexpr, PAGE: tl.constexpr, LINES: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1)
    at = tl.arange(0, HALF_BLOCK)[None, :]
    inside = at < HALF
    column = tl.arange(0, BLOCK)
    weight = tl.load(norm + column, mask=column < LATENT, other=0.0).to(tl.float32)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    position = tl.load(positions + token).to(tl.int64)
    cos = tl.load(cos_sin + position * (2 * HALF) + at, mask=inside, other=0.0)
    sin = tl.load(cos_sin + position * (2 * HALF) + HALF + at, mask=inside, other=0.0)
    if group > 0:
        head = (group - 1) * GROUP + tl.arange(0, GROUP)[:, None]
        mask = inside & (head < HEADS)
        low, high = _rotated(given + token * given_stride + head * head_stride, mask, at, cos, sin, HALF, PAIRED)
        target = out + token * out_stride + head * out_head_stride + at
        tl.store(target, low.to(out.dtype.element_ty), mask=mask)
        tl.store(target + HALF, high.to(out.dtype.element_ty), mask=mask)
    else:
        line = latents + token * latent_stride
        value = tl.load(line + column, mask=column < LATENT, other=0.0).to(tl.float32)
        value = value * tl.rsqrt(tl.sum(value * value, axis=0) / LATENT + eps) * weight
        latent = finite(value).to(kv.dtype.element_ty)
        first, second = _rotated(line + LATENT, inside, at, cos, sin, HALF, PAIRED)
        first_key, second_key = finite(first).to(kv.dtype.element_ty), finite(second).to(kv.dtype.element_ty)
        if LINES:
            copy = lines + token * (LATENT + 2 * HALF)
            tl.store(copy + column, latent, mask=column < LATENT)
            tl.store(copy + LATENT + at, first_key, mask=inside)
            tl.store(copy + LATENT + HALF + at, second_key, mask=inside)
        slot = tl.load(slots + token)
        if slot >= 0:
            place = kv + (slot // PAGE) * page_stride + (slot % PAGE) * (LATENT + 2 * HALF)
            tl.store(place + column, latent, mask=column < LATENT)
            tl.store(place + LATENT + at, first_key, mask=inside)
            tl.store(place + LATENT + HALF + at, second_key, mask=inside)


def store_latents(
    rotated_NHR: Tensor,
    latents_ND: Tensor,
    norm_C: Tensor,
    cos_sin_PR: Tensor,
    positions_N: Tensor,
    slots_N: Tensor,
    out_NHR: Tensor,
    kv_layer: Tensor,
    shape: LatentShape,
    lines_ND: Tensor | None = None,
    *,
    eps: float,
    paired: bool,
    pdl: bool = False,
) -> None:
    """Write the rotated part of all queries, and each token's normed latent vector and rotated key.

    Of what is rotated, the first halves of all pairs are written before the second ones, in queries and keys alike.

    Args:
        rotated_NHR: Part of the queries that is rotated; the last dimension is contiguous.
        latents_ND: Latent vectors c before their norm, then the keys before their rotation; rows may be apart.
        norm_C: Weight of the norm.
        cos_sin_PR: Rotary table, float32: R / 2 cosines of each position, then R / 2 sines.
        positions_N: Position of each token, int32 or int64.
        slots_N: Place of each token in the pages, int64: page * page_size + offset; -1 stores nothing.
        out_NHR: Output for what is rotated of the queries; the last dimension is contiguous.
        kv_layer: Pages of the layer, `[pages, T, D]`. Values that are not finite are stored as 0.
        shape: The sizes.
        lines_ND: Output, contiguous, for the vectors that are stored; None without.
        eps: Epsilon of the norm.
        paired: Whether pairs of elements lie side by side, and not half of R apart.
        pdl: Whether to use programmatic dependent launch.
    """
    half = shape.rotated_dim // 2
    group = min(_GROUP, triton.next_power_of_2(shape.heads))
    _store_latents_kernel[(len(latents_ND), 1 + triton.cdiv(shape.heads, group))](
        rotated_NHR, latents_ND, norm_C, cos_sin_PR, positions_N, slots_N, out_NHR, kv_layer, lines_ND,
        rotated_NHR.stride(0), rotated_NHR.stride(1), out_NHR.stride(0), out_NHR.stride(1), latents_ND.stride(0),
        kv_layer.stride(0), eps,
        HEADS=shape.heads, GROUP=group, LATENT=shape.latent_dim, BLOCK=triton.next_power_of_2(shape.latent_dim),
        HALF=half, HALF_BLOCK=triton.next_power_of_2(half), PAIRED=paired, PAGE=shape.page_size,
        LINES=lines_ND is not None, PDL=pdl,
        num_warps=4 if shape.latent_dim > 128 else 1, launch_pdl=pdl,
    )  # fmt: skip
