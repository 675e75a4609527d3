"""`CudaWornOps`: a decode step's products for rows that use one low-rank adapter or none, with its updates inside.

Owns the assignment of updates to products (csrc/worn.cuh), so that a layer takes as many launches as without adapters;
never serves several adapters, biases, ranks over `WORN_RANK`, or more rows than products/even_linear.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch

from headrace.ops.cuda.adapters.rows import LoraBatch, LoraSite, WornSite
from headrace.ops.cuda.block import CudaOps, CudaProduct
from headrace.ops.cuda.products.even_linear import EvenLinear, Squares
from headrace.ops.stream import Stream

if TYPE_CHECKING:
    from torch import Tensor

    from headrace.ops.cuda.block import DecodeStep, PrefillStep
    from headrace.ops.stream import HeadNorms

__all__ = ["CudaWornOps"]


class CudaWornOps:
    """The operations of one step of 2 to 64 rows that use one adapter or none."""

    def __init__(
        self,
        ops: CudaOps,
        even: EvenLinear,
        batch: LoraBatch,
        own_M4: Tensor,
        sites: Mapping[tuple[int, str], LoraSite],
        *,
        feeds: bool = True,
    ) -> None:
        """Compute with `ops`.

        Args:
            ops: The operations of the layers' mixer.
            even: The products of few rows that belong to `ops`.
            batch: The rows that use the adapter.
            own_M4: The adapter's lines of the table, which `pick` copied.
            sites: The sites by (layer, name).
            feeds: Whether the adapter updates gate, up or down.
        """
        self._ops, self._even, self._batch, self._own_M4 = ops, even, batch, own_M4
        self._sites, self._feeds = sites, feeds

    def embed(self, x_NE: Tensor, _tokens_N: Tensor) -> Tensor:
        """Return the embeddings unchanged."""
        return x_NE

    def attend(
        self,
        stream: Stream,
        norm_E: Tensor,
        qkv: CudaProduct,
        head_norms: HeadNorms | None,
        step: DecodeStep | PrefillStep,
        kv: Tensor,
        layer: int,
    ) -> tuple[Tensor, Tensor]:
        """Do what `CudaOps.attend` does, with the updates of queries, keys and values."""
        x_NE, squares, total_NE = self._scaled(stream, norm_E)
        worn = self._worn(layer, "qkv")
        return self._ops.attend_inside(x_NE, squares, qkv, head_norms, step, kv, layer, worn), total_NE

    def feed(self, stream: Stream, norm_E: Tensor, gate_up: CudaProduct, layer: int) -> tuple[Tensor, Tensor]:
        """Do what `CudaOps.feed` does, with the updates of gate and up."""
        x_NE, squares, total_NE = self._scaled(stream, norm_E)
        out_NF = torch.empty(len(x_NE), len(gate_up.weight_OI) // 2, dtype=x_NE.dtype, device=x_NE.device)
        self._even.silu_mul(x_NE, gate_up.weight_OI, out_NF, squares, self._worn(layer, "gate_up"))
        return out_NF, total_NE

    def add(
        self, x_NI: Tensor, packed: CudaProduct, total_NE: Tensor, norm_E: Tensor | None, layer: int, site: str
    ) -> Stream:
        """Do what `CudaOps.add` does, with the site's update."""
        out_NE, worn = torch.empty_like(total_NE), self._worn(layer, site)
        if norm_E is None:
            self._even.product(x_NI, packed.weight_OI, out_NE, worn=worn)
            return Stream(out_NE, total_NE)
        return Stream(out_NE, total_NE, self._even.add(x_NI, packed.weight_OI, total_NE, norm_E, out_NE, worn))

    def attend_with(
        self,
        qkv_NX: Tensor,
        head_norms: HeadNorms | None,
        step: DecodeStep | PrefillStep,
        kv: Tensor,
        layer: int,
    ) -> Tensor:
        """Do what `CudaOps.attend_with` does."""
        return self._ops.attend_with(qkv_NX, head_norms, step, kv, layer)

    def linear(self, x_NI: Tensor, packed: CudaProduct, layer: int, site: str) -> Tensor:
        """Return x W^T, with the site's update if the adapter has such a site."""
        if (layer, site) not in self._sites:
            return self._ops.product(x_NI, packed)
        out_NO = torch.empty(len(x_NI), len(packed.weight_OI), dtype=x_NI.dtype, device=x_NI.device)
        self._even.product(x_NI, packed.weight_OI, out_NO, worn=self._worn(layer, site))
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

    def _worn(self, layer: int, site: str) -> WornSite | None:
        if site in ("gate_up", "down") and not self._feeds:
            return None
        place = self._sites[layer, site]
        own_M4 = self._own_M4[place.line : place.line + len(place.sizes_out)]
        return WornSite(self._batch.arena, own_M4, self._batch.slots_N)

    def _scaled(self, stream: Stream, norm_E: Tensor) -> tuple[Tensor, Squares | None, Tensor]:
        """Return (the input of a product, the squares whose factors it lacks or None, the sum)."""
        x_NE, total_NE, pending = stream
        if isinstance(pending, Squares):
            assert total_NE is not None
            return x_NE, pending, total_NE
        normed_NE, total_NE = self._ops.normed(stream, norm_E)
        return normed_NE, None, total_NE
