"""Causal attention of prefills over pages in Triton, for heads of any size; never writes keys or values.

It takes what no other kernel takes, as split.py does for decodes. A program has some consecutive tokens of a row, with
all query heads that share a key head, so that keys in a window are read by few programs. Tiles with the longest context
come first. Shape letters as in `ops/paged.py`; J tiles.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np
import torch
import triton
import triton.language as tl

from headrace.ops.cuda.attention.scores import factors_of, first_weights, scores_of
from headrace.ops.cuda.attention.tiles import PlanRing, tile_jobs
from headrace.ops.paged import UNSCALED, KvScales

if TYPE_CHECKING:
    from torch import Tensor

    from headrace.ops.cuda.attention.shape import HeadShape

__all__ = ["GroupedAttention", "GroupedTiling", "grouped_tiling"]

_RESERVED: Final = 8 << 10
"""Bytes of shared memory left for what a program needs besides queries, keys and values."""
_MOST_STAGES: Final = 4
_OTHER_STAGES: Final = 2
"""Stages without keys and values in shared memory."""


class GroupedTiling(NamedTuple):
    """The work of a program; sizes are powers of two."""

    queries: int
    """Queries, of all heads of a group."""
    keys: int
    """Keys that are read at once."""
    warps: int
    stages: int
    """Steps of the pipeline: a page's number, its keys and values in shared memory, and arithmetic."""


@triton.jit
def _attend_to(
    query, at_query, kv, row_pages, begin, end, first, most, total, summed,
    page_stride, part_stride, token_stride, head_offset, scale, cap,
    DIM: tl.constexpr, PADDED: tl.constexpr, PAGE: tl.constexpr, KEYS: tl.constexpr, WINDOW: tl.constexpr,
    CAP: tl.constexpr, MASK: tl.constexpr,
):  # fmt: skip
    """Attend to the keys from `begin` to `end`; without MASK all queries see all of them."""
    dim = tl.arange(0, PADDED)
    for block in range(begin, end, KEYS):
        at = block + tl.arange(0, KEYS)
        if MASK:
            there = (at < end) & (at >= first)
            page = tl.load(row_pages + at // PAGE, mask=there, other=0).to(tl.int64)
        else:
            there = at < end
            page = tl.load(row_pages + at // PAGE).to(tl.int64)
        line = page * page_stride + (at % PAGE) * token_stride + head_offset
        key_at = kv + line[None, :] + dim[:, None]
        value_at = kv + part_stride + line[:, None] + dim[None, :]
        if MASK or DIM != PADDED:
            key = tl.load(key_at, mask=there[None, :] & (dim < DIM)[:, None], other=0.0)
            value = tl.load(value_at, mask=there[:, None] & (dim < DIM)[None, :], other=0.0)
        else:
            key = tl.load(key_at)
            value = tl.load(value_at)
        scores = scores_of(tl.dot(query, key.to(query.dtype)), scale, cap, CAP)
        if MASK:
            seen = at[None, :] <= at_query[:, None]
            if WINDOW > 0:
                seen = seen & (at[None, :] > at_query[:, None] - WINDOW)
            scores = tl.where(seen, scores, float("-inf"))
        higher = tl.maximum(most, tl.max(scores, axis=1))
        ratio = tl.exp2(most - higher)
        weight = tl.exp2(scores - higher[:, None])
        total = total * ratio + tl.sum(weight, axis=1)
        summed = tl.dot(weight.to(query.dtype), value.to(query.dtype), summed * ratio[:, None])
        most = higher
    return most, total, summed


@triton.jit
def _grouped_attention_kernel(
    q, sinks, kv, out, jobs, pages, q_stride, page_stride, part_stride, token_stride, scale, cap, v_scale,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, MEMBERS: tl.constexpr, DIM: tl.constexpr, PADDED: tl.constexpr,
    PAGE: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr, WINDOW: tl.constexpr, CAP: tl.constexpr,
    SINKS: tl.constexpr,
):  # fmt: skip
    job = tl.program_id(0) // KV_HEADS
    kv_head = tl.program_id(0) % KV_HEADS
    token = tl.load(jobs + job * 4).to(tl.int64)
    count = tl.load(jobs + job * 4 + 1)
    position = tl.load(jobs + job * 4 + 2)
    row_pages = pages + tl.load(jobs + job * 4 + 3)
    own = tl.arange(0, QUERIES)
    member = own % MEMBERS
    number = own // MEMBERS
    real = (number < count) & (member < GROUP)
    dim = tl.arange(0, PADDED)
    inside = real[:, None] & (dim < DIM)[None, :]
    head = kv_head * GROUP + member
    line = q + (token + number)[:, None] * q_stride + head[:, None] * DIM
    query = tl.load(line + dim[None, :], mask=inside, other=0.0)
    at_query = position + number
    most, total = first_weights(sinks + kv_head * GROUP, member, real, QUERIES, SINKS)
    summed = tl.zeros([QUERIES, PADDED], tl.float32)
    end = position + count
    first = 0
    begin = 0
    if WINDOW > 0:
        first = tl.maximum(position - WINDOW + 1, 0)
        begin = first // KEYS * KEYS
    else:
        begin = (position + 1) // KEYS * KEYS
        most, total, summed = _attend_to(
            query, at_query, kv, row_pages, 0, begin, first, most, total, summed,
            page_stride, part_stride, token_stride, kv_head * DIM, scale, cap,
            DIM, PADDED, PAGE, KEYS, WINDOW, CAP, False,
        )  # fmt: skip
    most, total, summed = _attend_to(
        query, at_query, kv, row_pages, begin, end, first, most, total, summed,
        page_stride, part_stride, token_stride, kv_head * DIM, scale, cap,
        DIM, PADDED, PAGE, KEYS, WINDOW, CAP, True,
    )  # fmt: skip
    spot = ((token + number)[:, None] * (KV_HEADS * GROUP) + head[:, None]) * DIM + dim[None, :]
    tl.store(out + spot, (summed / total[:, None] * v_scale).to(out.dtype.element_ty), mask=inside)


class GroupedAttention:
    """Attention of prefills over pages that already hold the new tokens: `plan` once for each step, then `run`."""

    def __init__(
        self, shape: HeadShape, device: torch.device, *, shared_bytes: int, how: GroupedTiling | None = None
    ) -> None:
        """Attend with heads of `shape`, in blocks that may have `shared_bytes` of shared memory."""
        self._shape, self._how = shape, how or grouped_tiling(shape, shared_bytes)
        self._members = triton.next_power_of_2(shape.heads // shape.kv_heads)
        self._ring = PlanRing(device)
        self._jobs_J4 = self._pages = torch.empty(0, dtype=torch.int32, device=device)

    def plan(self, counts: Sequence[int], lengths: Sequence[int], pages: Sequence[Sequence[int]]) -> None:
        """Plan a step on the current stream.

        Args:
            counts: New tokens of each row; queries are packed in this order.
            lengths: Context length of each row, the new tokens included.
            pages: Page numbers of each row, at least as many as its length needs.
        """
        tokens = max(1, self._how.queries // self._members)
        jobs_J4, numbers = tile_jobs(counts, lengths, pages, self._shape.page_size, tokens)
        sent = self._ring.send(np.concatenate([jobs_J4.ravel(), numbers]))
        self._jobs_J4, self._pages = sent[: jobs_J4.size].view(-1, 4), sent[jobs_J4.size :]

    def run(
        self,
        q_NHD: Tensor,
        kv_layer: Tensor,
        out_NHD: Tensor,
        scales: KvScales = UNSCALED,
        sinks_H: Tensor | None = None,
    ) -> None:
        """Enqueue one layer; `q_NHD` may be a view into packed q, k and v (last two dimensions contiguous).

        `out_NHD` is contiguous, and `sinks_H` float32.
        """
        shape, how = self._shape, self._how
        scale, cap = factors_of(shape, scales)
        _grouped_attention_kernel[(len(self._jobs_J4) * shape.kv_heads,)](
            q_NHD, q_NHD if sinks_H is None else sinks_H, kv_layer, out_NHD, self._jobs_J4, self._pages,
            q_NHD.stride(0), kv_layer.stride(0), kv_layer.stride(1), kv_layer.stride(2), scale, cap, scales.v,
            KV_HEADS=shape.kv_heads, GROUP=shape.heads // shape.kv_heads, MEMBERS=self._members, DIM=shape.head_dim,
            PADDED=triton.next_power_of_2(shape.head_dim), PAGE=shape.page_size,
            QUERIES=max(how.queries, self._members), KEYS=how.keys, WINDOW=shape.window or 0,
            CAP=shape.cap is not None, SINKS=sinks_H is not None, num_warps=how.warps, num_stages=how.stages,
        )  # fmt: skip


def grouped_tiling(shape: HeadShape, shared_bytes: int) -> GroupedTiling:
    """Return the division of the work; not measured."""
    line = triton.next_power_of_2(shape.head_dim) * shape.dtype.itemsize
    queries, keys, warps = (
        (128, 64, 4) if line <= 128 else (128, 64, 8) if line <= 256 else (64, 32, 8) if line <= 512 else (32, 16, 8)
    )
    stages = (shared_bytes - _RESERVED - queries * line) // (2 * keys * line) + _OTHER_STAGES
    return GroupedTiling(queries, keys, warps, max(1, min(_MOST_STAGES, stages)))
