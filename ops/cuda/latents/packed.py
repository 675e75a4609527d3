"""`CudaLatents`: attention of one layer to latent vectors on CUDA, with the products before and behind it.

The products with W_UK and W_UV are one batched product of torch's for all heads. Shape letters as in `ops/latents.py`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import torch

from headrace.ops.cuda.attention.steps import ATTENTION, CudaStep, DecodeStep, PrefillStep, WholeStep
from headrace.ops.cuda.hazards import Launch
from headrace.ops.cuda.latents.store import store_latents

if TYPE_CHECKING:
    from torch import Tensor

    from headrace.ops.cuda.hazards import Chain
    from headrace.ops.cuda.latents.shape import LatentShape
    from headrace.ops.latents import LatentWeights

__all__ = ["CudaLatents"]

_PRODUCTS: Final = Launch("the products of heads", overlaps=False, writes=frozenset(("activations",)))


class CudaLatents:
    """Attention of one layer; weights stay where they were loaded."""

    def __init__(
        self,
        weights: LatentWeights,
        layer: int,
        shape: LatentShape,
        cos_sin_PR: Tensor,
        chain: Chain,
        *,
        paired: bool,
        pdl: bool,
    ) -> None:
        """Attend in the layer with the number `layer`.

        Args:
            weights: The matrices of keys and values, in the dtype of activations, and the norm of latent vectors.
            layer: Number of the layer.
            shape: The sizes.
            cos_sin_PR: Rotary table, float32: R / 2 cosines of each position, then R / 2 sines.
            chain: Where launches are noted.
            paired: Whether pairs of rotated elements lie side by side.
            pdl: Whether to use programmatic dependent launch.
        """
        self._keys_HPC, self._values_HVC = weights.split()
        self._norm_C, self._epsilon = weights.norm_C, weights.epsilon
        self._layer, self._shape, self._cos_sin_PR = layer, shape, cos_sin_PR
        self._note, self._paired, self._pdl = chain.note, paired, pdl
        self._storage = Launch("the storage of latent vectors", pdl, writes=frozenset(("activations", "new keys")))

    def __call__(self, queries_NHX: Tensor, latents_ND: Tensor, step: CudaStep, kv: Tensor) -> Tensor:
        """Store the tokens' vectors in their pages, attend, and return the values of all heads, [N, H * V]."""
        assert not isinstance(step, WholeStep), "no kernel does all at once"
        tokens, shape, kv_layer = len(queries_NHX), self._shape, kv[self._layer]
        plain_NHP, rotated_NHR = queries_NHX.tensor_split((self._keys_HPC.shape[1],), 2)
        q_NHD = queries_NHX.new_empty(tokens, shape.heads, shape.head_dim)
        turned_HNC = q_NHD[:, :, : shape.latent_dim].transpose(0, 1)
        self._note(_PRODUCTS)
        torch.bmm(plain_NHP.transpose(0, 1), self._keys_HPC, out=turned_HNC)
        self._store(rotated_NHR, latents_ND, q_NHD, step, kv_layer)
        sums_NHC = queries_NHX.new_empty(tokens, shape.heads, shape.latent_dim)
        if isinstance(step, PrefillStep):
            self._note(ATTENTION)
            step.attention.run(q_NHD, kv_layer, sums_NHC)
        else:
            self._note(step.launch)
            step.attention.run(q_NHD, kv_layer, step.inputs, sums_NHC)
        out_NHV = queries_NHX.new_empty(tokens, shape.heads, self._values_HVC.shape[1])
        self._note(_PRODUCTS)
        torch.bmm(sums_NHC.transpose(0, 1), self._values_HVC.transpose(1, 2), out=out_NHV.transpose(0, 1))
        return out_NHV.flatten(1)

    def _store(
        self, rotated_NHR: Tensor, latents_ND: Tensor, q_NHD: Tensor, step: PrefillStep | DecodeStep, kv_layer: Tensor
    ) -> None:
        """Rotate into `q_NHD`, and store the tokens' vectors."""
        if isinstance(step, PrefillStep):
            positions_N, slots_N = step.positions_N, step.slots_N
        else:
            positions_N, slots_N = step.inputs.positions_B, step.inputs.slots_B
        self._note(self._storage)
        store_latents(
            rotated_NHR, latents_ND, self._norm_C, self._cos_sin_PR, positions_N, slots_N, q_NHD, kv_layer,
            self._shape, eps=self._epsilon, paired=self._paired, pdl=self._pdl,
        )  # fmt: skip
