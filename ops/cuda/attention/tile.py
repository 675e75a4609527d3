"""Causal attention of prefills over pages (csrc/tile_attention.cu); never writes keys or values, never picks pages.

A step's rows are cut into tiles of 128 tokens; the tiles with the longest context come first. Heads with the same keys
and values are computed side by side. Needs Hopper for its copies, clusters and products. Shape letters are those of
`ops/paged.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from headrace.ops.cuda.compiling.source import compiled
from headrace.ops.paged import UNSCALED, KvScales

if TYPE_CHECKING:
    from torch import Tensor

    from headrace.ops.cuda.attention.shape import HeadShape

__all__ = ["TileAttention"]

_QUERIES = 128
_RING = 3
"""Most plans that may be on their way to the device."""


class TileAttention:
    """Attention of prefills over pages that already hold the new tokens: `plan` once for each step, then `run`."""

    def __init__(self, shape: HeadShape, device: torch.device, *, pdl: bool = False) -> None:
        """Attend with heads of `shape`; `pdl` is whether to use programmatic dependent launch."""
        self._shape, self._device, self._pdl = shape, device, pdl
        self._module = self.build(shape)
        self._ring = [torch.empty(0, dtype=torch.int32, pin_memory=True) for _ in range(_RING)]
        self._sent = [torch.cuda.Event() for _ in range(_RING)]
        self._plans = 0
        self._jobs_J4 = self._pages = torch.empty(0, dtype=torch.int32, device=device)

    @staticmethod
    def build(shape: HeadShape) -> Any:
        """Return the compiled kernels for heads of `shape`; takes half a minute and a compiler the first time.

        Raises:
            CannotCompile: The kernels are not kept and cannot be compiled.
            OSError: A compiler cannot be run, or the folder of kernels cannot be written.
        """
        group = shape.heads // shape.kv_heads
        return compiled("tile_attention", KV_HEADS=shape.kv_heads, GROUP=group, PAGE=shape.page_size)

    def plan(self, counts: Sequence[int], lengths: Sequence[int], pages: Sequence[Sequence[int]]) -> None:
        """Plan a step on the current stream.

        Args:
            counts: New tokens of each row; queries are packed in this order.
            lengths: Context length of each row, the new tokens included.
            pages: Page numbers of each row, at least as many as its length needs.
        """
        counts_W, lengths_W = np.array(counts), np.array(lengths)
        tiles_W = -(-counts_W // _QUERIES)
        row_J = np.arange(len(counts_W)).repeat(tiles_W)
        offset_J = (np.arange(len(row_J)) - (tiles_W.cumsum() - tiles_W)[row_J]) * _QUERIES
        used_W = -(-lengths_W // self._shape.page_size)
        count_J = np.minimum(counts_W[row_J] - offset_J, _QUERIES)
        position_J = (lengths_W - counts_W)[row_J] + offset_J
        token_J, page_J = (counts_W.cumsum() - counts_W)[row_J] + offset_J, (used_W.cumsum() - used_W)[row_J]
        first = np.argsort(-(position_J + count_J), kind="stable")
        jobs_J4 = np.stack((token_J, count_J, position_J, page_J), 1)[first]
        sent = self._send(np.concatenate([jobs_J4.ravel(), *(row[:n] for row, n in zip(pages, used_W, strict=True))]))
        self._jobs_J4, self._pages = sent[: jobs_J4.size].view(-1, 4), sent[jobs_J4.size :]

    def run(self, q_NHD: Tensor, kv_layer: Tensor, out_NHD: Tensor, scales: KvScales = UNSCALED) -> None:
        """Enqueue one layer; `q_NHD` may be a view into packed q, k and v (last two dimensions contiguous).

        `out_NHD` is contiguous; `scales` must be 1, since the cache has 16 bits.
        """
        self._module.run(q_NHD, kv_layer, out_NHD, self._jobs_J4, self._pages, self._shape.scale, self._pdl)

    def _send(self, words: np.ndarray[Any, np.dtype[np.int64]]) -> Tensor:
        slot = self._plans % _RING
        self._plans += 1
        self._sent[slot].synchronize()
        if len(self._ring[slot]) < len(words):
            self._ring[slot] = torch.empty(2 * len(words), dtype=torch.int32, pin_memory=True)
        pinned = self._ring[slot][: len(words)]
        pinned.numpy()[:] = words
        on_device = pinned.to(self._device, non_blocking=True)
        self._sent[slot].record()
        return on_device
