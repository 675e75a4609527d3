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

from headrace.ops.cuda.attention.tiles import PlanRing, tile_jobs
from headrace.ops.cuda.compiling.source import compiled
from headrace.ops.paged import UNSCALED, KvScales

if TYPE_CHECKING:
    from torch import Tensor

    from headrace.ops.cuda.attention.shape import HeadShape

__all__ = ["TileAttention"]

_QUERIES = 128


class TileAttention:
    """Attention of prefills over pages that already hold the new tokens: `plan` once for each step, then `run`."""

    def __init__(self, shape: HeadShape, device: torch.device, *, pdl: bool = False) -> None:
        """Attend with heads of `shape`; `pdl` is whether to use programmatic dependent launch."""
        self._shape, self._pdl = shape, pdl
        self._module = self.build(shape)
        self._ring = PlanRing(device)
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
        jobs_J4, numbers = tile_jobs(counts, lengths, pages, self._shape.page_size, _QUERIES)
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

        `out_NHD` is contiguous; `scales` must be 1, since the cache has 16 bits, and there are no sinks.
        """
        assert sinks_H is None
        self._module.run(q_NHD, kv_layer, out_NHD, self._jobs_J4, self._pages, self._shape.scale, self._pdl)
