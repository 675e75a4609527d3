"""Attention of whole prompts to keys and values that are made of their latent vectors, on CUDA (Triton).

Where all that a step's tokens attend to is computed in the same step, keys and values of heads are cheaper than latent
vectors: P + R and V elements for each pair of a query and a key instead of C + R and C. A program takes a piece of the
queries of one head and row. Nothing is read from pages. Shape letters as in `ops/latents.py`; J jobs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from headrace.ops.cuda.latents.attend import LatentTiling

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["attend_expanded"]

_LOG2_E = 1.4426950408889634


@triton.jit
def _columns(base, line, mask, stride, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """Return some lines of `SIZE` elements, padded to `BLOCK` with zeros; zeros where `mask` is not set."""
    column = tl.arange(0, BLOCK)[None, :]
    return tl.load(base + line[:, None] * stride + column, mask=mask[:, None] & (column < SIZE), other=0.0)


@triton.jit
def _latent_expanded_kernel(
    plain, rotated, up, keys, jobs, out,
    plain_stride, plain_head_stride, up_stride, key_stride, scale,
    HEADS: tl.constexpr, PLAIN: tl.constexpr, ROTATED: tl.constexpr, VALUE: tl.constexpr, P: tl.constexpr,
    R: tl.constexpr, V: tl.constexpr, LANES: tl.constexpr, TILE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    job = jobs + tl.program_id(0) * 3
    head = tl.program_id(1)
    start, first, count = tl.load(job), tl.load(job + 1), tl.load(job + 2)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    number = tl.arange(0, LANES)
    real = number < count
    query = first + number
    at = query.to(tl.int64)
    q_plain = _columns(plain + head * plain_head_stride, at, real, plain_stride, PLAIN, P)
    q_rotated = _columns(rotated + head * ROTATED, at, real, HEADS * ROTATED, ROTATED, R)
    up += head * (PLAIN + VALUE)
    most = tl.full([LANES], float("-inf"), tl.float32)
    total = tl.zeros([LANES], tl.float32)
    summed = tl.zeros([LANES, V], tl.float32)
    end = first + count
    for begin in range(start, end, TILE):
        token = begin + tl.arange(0, TILE)
        line, there = token.to(tl.int64), token < end
        k_plain = _columns(up, line, there, up_stride, PLAIN, P)
        k_rotated = _columns(keys, line, there, key_stride, ROTATED, R)
        value = _columns(up + PLAIN, line, there, up_stride, VALUE, V)
        scores = tl.dot(q_plain, tl.trans(k_plain))
        scores = tl.dot(q_rotated, tl.trans(k_rotated), scores)
        scores = tl.where(token[None, :] <= query[:, None], scores * scale, float("-inf"))
        higher = tl.maximum(most, tl.max(scores, axis=1))
        ratio = tl.exp2(most - higher)
        weight = tl.exp2(scores - higher[:, None])
        total = total * ratio + tl.sum(weight, axis=1)
        summed = tl.dot(weight.to(value.dtype), value, summed * ratio[:, None])
        most = higher
    column = tl.arange(0, V)[None, :]
    target = out + (at[:, None] * HEADS + head) * VALUE + column
    tl.store(target, (summed / total[:, None]).to(out.dtype.element_ty), mask=real[:, None] & (column < VALUE))


def attend_expanded(
    plain_NHP: Tensor,
    rotated_NHR: Tensor,
    up_NX: Tensor,
    keys_NR: Tensor,
    jobs_J3: Tensor,
    out_NHV: Tensor,
    tiling: LatentTiling,
    *,
    scale: float,
    pdl: bool = False,
) -> None:
    """Compute `out = softmax(s q k^T) v`, where each token sees those of its row up to itself.

    Args:
        plain_NHP: Part of the queries that is not rotated; the last dimension is contiguous.
        rotated_NHR: The rotated part, contiguous.
        up_NX: By head, P elements of the key, then V of the value, [N, H * (P + V)]; lines are contiguous.
        keys_NR: The rotated part of the key of all heads; the last dimension is contiguous.
        jobs_J3: By job the first token of its row, the first of its own tokens, and how many these are; int32.
        out_NHV: Output, contiguous.
        tiling: How the work is cut; lanes are tokens.
        scale: Factor s of the scores.
        pdl: Whether to use programmatic dependent launch.
    """
    (_, heads, plain), rotated, value = plain_NHP.shape, rotated_NHR.shape[2], out_NHV.shape[2]
    blocks = (max(16, triton.next_power_of_2(size)) for size in (plain, rotated, value))
    _latent_expanded_kernel[(len(jobs_J3), heads)](
        plain_NHP, rotated_NHR, up_NX, keys_NR, jobs_J3, out_NHV,
        plain_NHP.stride(0), plain_NHP.stride(1), up_NX.stride(0), keys_NR.stride(0), scale * _LOG2_E,
        HEADS=heads, PLAIN=plain, ROTATED=rotated, VALUE=value, **dict(zip("PRV", blocks, strict=True)),
        LANES=tiling.lanes, TILE=tiling.tile, PDL=pdl,
        num_warps=tiling.warps, num_stages=tiling.stages, launch_pdl=pdl,
    )  # fmt: skip
