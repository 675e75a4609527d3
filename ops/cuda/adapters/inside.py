"""`CudaInsideOps`: a decode step's products for rows that use one low-rank adapter or none, with its updates inside.

Owns the assignment of updates to products (csrc/updates.cuh), so that a layer takes as many launches as without
adapters; never serves several adapters, biases, ranks over `INSIDE_RANK`, or more rows than such products take.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch

from headrace.ops.cuda.adapters.rows import LoraBatch, LoraSite, UpdateSite
from headrace.ops.cuda.attention.steps import DecodeStep
from headrace.ops.cuda.products.fusion import GATED, Squares
from headrace.ops.stream import Stream

if TYPE_CHECKING:
    from torch import Tensor

    from headrace.ops.cuda.attention.steps import CudaKv, CudaStep
    from headrace.ops.cuda.block import CudaOps
    from headrace.ops.cuda.products.packed import CudaProduct
    from headrace.ops.stream import HeadNorms

__all__ = ["CudaInsideOps"]


class CudaInsideOps:
    """The operations of one step of 2 to 64 rows that use one adapter or none."""

    def __init__(
        self,
        ops: CudaOps,
        batch: LoraBatch,
        own_M4: Tensor,
        sites: Mapping[tuple[int, str], LoraSite],
        *,
        feeds: bool = True,
    ) -> None:
        """Compute with `ops`.

        Args:
            ops: The operations of the layers' mixer.
            batch: The rows that use the adapter.
            own_M4: The adapter's lines of the table, which `pick` copied.
            sites: The sites by (layer, name).
            feeds: Whether the adapter updates gate, up or down.
        """
        self._ops, self._batch, self._own_M4 = ops, batch, own_M4
        self._sites, self._feeds = sites, feeds

    def embed(self, x_NE: Tensor, tokens_N: Tensor) -> Tensor:
        """Do what `CudaOps.embed` does."""
        return self._ops.embed(x_NE, tokens_N)

    def attend(
        self,
        stream: Stream,
        norm_E: Tensor,
        qkv: CudaProduct,
        head_norms: HeadNorms | None,
        step: CudaStep,
        kv: CudaKv,
        layer: int,
    ) -> tuple[Tensor, Tensor]:
        """Do what `CudaOps.attend` does, with the updates of queries, keys and values."""
        x_NE, squares, total_NE = self._scaled(stream, norm_E)
        assert isinstance(step, DecodeStep)
        heads, updates = qkv.runs.heads[len(x_NE)], self._updates(layer, "qkv")
        return self._ops.attend_inside(heads, x_NE, squares, qkv, head_norms, step, kv, layer, updates), total_NE

    def feed(self, stream: Stream, norm_E: Tensor, gate_up: CudaProduct, layer: int) -> tuple[Tensor, Tensor]:
        """Do what `CudaOps.feed` does, with the updates of gate and up."""
        x_NE, squares, total_NE = self._scaled(stream, norm_E)
        out_NF = torch.empty(len(x_NE), gate_up.size_out // 2, dtype=x_NE.dtype, device=x_NE.device)
        chosen = (gate_up.runs.gated if squares is None else gate_up.runs.factors_gated)[len(x_NE)]
        gate_up.run(chosen, x_NE, out_NF, squares, GATED, self._updates(layer, "gate_up"))
        return out_NF, total_NE

    def add(
        self, x_NI: Tensor, packed: CudaProduct, total_NE: Tensor, norm_E: Tensor | None, layer: int, site: str
    ) -> Stream:
        """Do what `CudaOps.add` does, with the site's update."""
        updates, rows = self._updates(layer, site), len(x_NI)
        if norm_E is not None and norm_E.dtype == x_NI.dtype:  # which no kernel reads in float32, as Gemma's are
            return self._ops.add_inside(packed.runs.residual[rows], x_NI, packed, total_NE, norm_E, updates)
        out_NE = torch.empty_like(total_NE)
        packed.run(packed.runs.plain[rows], x_NI, out_NE, updates=updates)
        return Stream(out_NE, total_NE)

    def attend_with(
        self,
        qkv_NX: Tensor,
        head_norms: HeadNorms | None,
        step: CudaStep,
        kv: CudaKv,
        layer: int,
    ) -> Tensor:
        """Do what `CudaOps.attend_with` does."""
        return self._ops.attend_with(qkv_NX, head_norms, step, kv, layer)

    def linear(self, x_NI: Tensor, packed: CudaProduct, layer: int, site: str) -> Tensor:
        """Return x W^T, with the site's update if the adapter has such a site."""
        if (layer, site) not in self._sites:
            return self._ops.product(x_NI, packed)
        out_NO = torch.empty(len(x_NI), packed.size_out, dtype=x_NI.dtype, device=x_NI.device)
        packed.run(packed.runs.plain[len(x_NI)], x_NI, out_NO, updates=self._updates(layer, site))
        return out_NO

    def summed(self, stream: Stream) -> tuple[Tensor, Tensor]:
        """Do what `CudaOps.summed` does."""
        return self._ops.summed(stream)

    def normed(self, stream: Stream, norm_E: Tensor) -> tuple[Tensor, Tensor]:
        """Do what `CudaOps.normed` does."""
        return self._ops.normed(stream, norm_E)

    def logits(self, x_SE: Tensor, head: CudaProduct) -> Tensor:
        """Do what `CudaOps.logits` does: no adapter here updates the head."""
        return self._ops.logits(x_SE, head)

    def _updates(self, layer: int, site: str) -> UpdateSite | None:
        if site in ("gate_up", "down") and not self._feeds:
            return None
        place = self._sites[layer, site]
        own_M4 = self._own_M4[place.line : place.line + len(place.sizes_out)]
        return UpdateSite(self._batch.arena, own_M4, self._batch.slots_N)

    def _scaled(self, stream: Stream, norm_E: Tensor) -> tuple[Tensor, Squares | None, Tensor]:
        """Return (the input of a product, the squares whose factors it lacks or None, the sum)."""
        x_NE, total_NE, pending = stream
        if isinstance(pending, Squares):
            assert total_NE is not None
            return x_NE, pending, total_NE
        normed_NE, total_NE = self._ops.normed(stream, norm_E)
        return normed_NE, None, total_NE
