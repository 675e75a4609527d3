"""`CudaWornOps`: a decode step's products for rows that use one low-rank adapter or none, with its updates inside.

Owns the assignment of updates to products (csrc/worn.cuh), so that a layer takes as many launches as without adapters;
never serves several adapters, biases, ranks over `WORN_RANK`, or more rows than products/even_linear.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch

from headrace.ops.cuda.adapters.rows import LoraBatch, LoraSite, WornSite
from headrace.ops.cuda.block import CudaOps, CudaProduct, Postponed
from headrace.ops.cuda.products.even_linear import EvenLinear, Squares

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["CudaWornOps"]


class CudaWornOps:
    """The products of one step of 2 to 64 rows that use one adapter or none."""

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
            ops: The operations of any attention window, as all have the same products.
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

    def head(self, logits_SV: Tensor, _hidden_SE: Tensor) -> Tensor:
        """Return the logits unchanged."""
        return logits_SV

    def add_product(
        self, x_NI: Tensor, packed: CudaProduct, residual_NE: Tensor, norm_E: Tensor | None, layer: int, site: str
    ) -> tuple[Tensor, Tensor | Squares]:
        """Do what `CudaOps.add_product` does, with the site's update."""
        out_NE, worn = torch.empty_like(residual_NE), self._worn(layer, site)
        if norm_E is None:
            self._even.product(x_NI, packed.weight_OI, out_NE, worn=worn)
            return out_NE, residual_NE
        return out_NE, self._even.add(x_NI, packed.weight_OI, residual_NE, norm_E, out_NE, worn)

    def norm_product(
        self, x_NE: Tensor, residual_NE: Tensor | Squares | None, weight_E: Tensor, packed: CudaProduct,
        layer: int, site: str,
    ) -> tuple[Postponed, Tensor]:  # fmt: skip
        """Do what `CudaOps.norm_product` does; `attend` will add the updates."""
        x_NE, squares, total_NE = self._normed(x_NE, residual_NE, weight_E)
        return Postponed(self._even, x_NE, packed, squares, self._worn(layer, site)), total_NE

    def norm_feed(
        self, x_NE: Tensor, residual_NE: Tensor | Squares | None, weight_E: Tensor, packed: CudaProduct,
        layer: int, site: str,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """Do what `CudaOps.norm_feed` does, with the updates of gate and up."""
        x_NE, squares, total_NE = self._normed(x_NE, residual_NE, weight_E)
        out_NF = torch.empty(len(x_NE), len(packed.weight_OI) // 2, dtype=x_NE.dtype, device=x_NE.device)
        self._even.silu_mul(x_NE, packed.weight_OI, out_NF, squares, self._worn(layer, site))
        return out_NF, total_NE

    def _worn(self, layer: int, site: str) -> WornSite | None:
        if site in ("gate_up", "down") and not self._feeds:
            return None
        place = self._sites[layer, site]
        own_M4 = self._own_M4[place.line : place.line + len(place.sizes_out)]
        return WornSite(self._batch.arena, own_M4, self._batch.slots_N)

    def _normed(
        self, x_NE: Tensor, residual_NE: Tensor | Squares | None, weight_E: Tensor
    ) -> tuple[Tensor, Squares | None, Tensor]:
        """Return (the input of a product, the squares that it lacks or None, the sum)."""
        if isinstance(residual_NE, Squares):
            return x_NE, residual_NE, residual_NE.total_NE
        normed_NE, total_NE = self._ops.normed_sum(x_NE, residual_NE, weight_E)
        return normed_NE, None, total_NE
