"""`CudaLatentOps`: the operations of models with latent attention on CUDA, and the layout of their pages."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from headrace.ops.cuda import fused
from headrace.ops.cuda.block import CudaOps
from headrace.ops.cuda.latents.packed import CudaLatents

if TYPE_CHECKING:
    from torch import Tensor

    from headrace.ops.cuda.experts.packed import ExpertProducts
    from headrace.ops.cuda.latents.shape import LatentShape
    from headrace.ops.cuda.products.packed import Products
    from headrace.ops.latents import LatentWeights
    from headrace.ops.paged import PageShape

__all__ = ["CudaLatentOps"]


class CudaLatentOps(CudaOps):
    """The operations of one model whose layers all attend to latent vectors; a page is `[T, C + R]` in a layer."""

    def __init__(
        self,
        shape: LatentShape,
        *,
        cos_sin_PR: Tensor,
        paired: bool,
        products: Products,
        experts: ExpertProducts | None = None,
    ) -> None:
        """Compute with vectors of `shape`.

        Args:
            shape: Heads and the sizes of a token's vector.
            cos_sin_PR: Rotary table, float32: R / 2 cosines of each position, then R / 2 sines.
            paired: Whether pairs of rotated elements lie side by side.
            products: The kernels of products on the one stream on which this runs.
            experts: The kernels of experts on that stream; None for those of `EXPERTS`.
        """
        super().__init__(shape, cos_sin_PD=cos_sin_PR, products=products, experts=experts)
        self._vectors, self._cos_sin_PR, self._paired = shape, cos_sin_PR, paired

    @property
    def page_shape(self) -> PageShape:
        """Shape of what a layer keeps in one page: [T, C + R]."""
        return (self._vectors.page_size, self._vectors.head_dim)

    def norm_with(self, x_NC: Tensor, weight_C: Tensor, epsilon: float) -> Tensor:
        """Return the RMS norm of vectors with an epsilon of their own."""
        normed_NC = torch.empty_like(x_NC)
        self.note(self._norm)
        fused.rms_norm(x_NC, weight_C, epsilon, normed_NC, pdl=self.pdl)
        return normed_NC

    def pack_latents(self, weights: LatentWeights, layer: int) -> CudaLatents:
        """Take the weights of a layer's attention, which stay where they are."""
        return CudaLatents(
            weights, layer, self._vectors, self._cos_sin_PR, self.products.room.chain, paired=self._paired,
            pdl=self.pdl,
        )  # fmt: skip
