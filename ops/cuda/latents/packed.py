"""`CudaLatents`: attention of one layer to latent vectors on CUDA, with the products before and behind it.

W_UK and W_UV are multiplied in one batched product of torch's for all heads, or in one product that makes the keys and
values of whole prompts. Shape letters as in `ops/latents.py`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import torch

from headrace.ops.cuda.attention.steps import ATTENTION, CudaKv, CudaStep, DecodeStep, PrefillStep, WholeStep
from headrace.ops.cuda.hazards import Launch
from headrace.ops.cuda.latents.running import LatentPrefill
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
        self._up_XC = weights.up.parts["values"]
        self._expands = self._keys_HPC.shape[1] + self._values_HVC.shape[1] < 2 * shape.latent_dim
        """Whether a key and a value of one head are smaller than a latent vector that stands for both."""
        self._norm_C, self._epsilon = weights.norm_C, weights.epsilon
        self._layer, self._shape, self._cos_sin_PR = layer, shape, cos_sin_PR
        self._note, self._paired, self._pdl = chain.note, paired, pdl
        self._storage = Launch("the storage of latent vectors", pdl, writes=frozenset(("activations", "new keys")))

    def __call__(self, queries_NHX: Tensor, latents_ND: Tensor, step: CudaStep, kv: CudaKv) -> Tensor:
        """Store the tokens' vectors in their pages, attend, and return the values of all heads, [N, H * V]."""
        assert not isinstance(step, WholeStep), "no kernel does all at once"
        plain_NHP, rotated_NHR = queries_NHX.tensor_split((self._keys_HPC.shape[1],), 2)
        out_NHV = queries_NHX.new_empty(len(queries_NHX), self._shape.heads, self._values_HVC.shape[1])
        if isinstance(step, PrefillStep) and self._expands:
            assert isinstance(step.attention, LatentPrefill)
            if step.attention.is_whole:
                self._whole(plain_NHP, rotated_NHR, latents_ND, step, step.attention, kv[self._layer], out_NHV)
                return out_NHV.flatten(1)
        sums_NHC = self._sums(plain_NHP, rotated_NHR, latents_ND, step, kv[self._layer])
        self._note(_PRODUCTS)
        torch.bmm(sums_NHC.transpose(0, 1), self._values_HVC.transpose(1, 2), out=out_NHV.transpose(0, 1))
        return out_NHV.flatten(1)

    def _sums(
        self,
        plain_NHP: Tensor,
        rotated_NHR: Tensor,
        latents_ND: Tensor,
        step: PrefillStep | DecodeStep,
        kv_layer: Tensor,
    ) -> Tensor:
        """Store the tokens' vectors, and return the sums of latent vectors of all heads, [N, H, C]."""
        shape = self._shape
        q_NHD = plain_NHP.new_empty(len(plain_NHP), shape.heads, shape.head_dim)
        turned_NHC, turned_NHR = q_NHD.tensor_split((shape.latent_dim,), 2)
        self._note(_PRODUCTS)
        torch.bmm(plain_NHP.transpose(0, 1), self._keys_HPC, out=turned_NHC.transpose(0, 1))
        self._store(rotated_NHR, latents_ND, turned_NHR, step, kv_layer)
        sums_NHC = plain_NHP.new_empty(len(plain_NHP), shape.heads, shape.latent_dim)
        if isinstance(step, PrefillStep):
            self._note(ATTENTION)
            step.attention.run(q_NHD, kv_layer, sums_NHC)
        else:
            self._note(step.launch)
            step.attention.run(q_NHD, kv_layer, step.inputs, sums_NHC)
        return sums_NHC

    def _whole(
        self,
        plain_NHP: Tensor,
        rotated_NHR: Tensor,
        latents_ND: Tensor,
        step: PrefillStep,
        attention: LatentPrefill,
        kv_layer: Tensor,
        out_NHV: Tensor,
    ) -> None:
        """Store the tokens' vectors, make keys and values of them, and attend to these."""
        lines_ND = torch.empty_like(latents_ND, memory_format=torch.contiguous_format)
        turned_NHR = torch.empty_like(rotated_NHR, memory_format=torch.contiguous_format)
        self._store(rotated_NHR, latents_ND, turned_NHR, step, kv_layer, lines_ND)
        c_NC, keys_NR = lines_ND.tensor_split((self._shape.latent_dim,), 1)
        self._note(_PRODUCTS)
        up_NX = torch.mm(c_NC, self._up_XC.T)
        self._note(ATTENTION)
        attention.run_whole(plain_NHP, turned_NHR, up_NX, keys_NR, out_NHV)

    def _store(
        self,
        rotated_NHR: Tensor,
        latents_ND: Tensor,
        out_NHR: Tensor,
        step: PrefillStep | DecodeStep,
        kv_layer: Tensor,
        lines_ND: Tensor | None = None,
    ) -> None:
        """Rotate queries into `out_NHR`, and store the tokens' vectors, also in `lines_ND` if that is given."""
        if isinstance(step, PrefillStep):
            positions_N, slots_N = step.positions_N, step.slots_N
        else:
            positions_N, slots_N = step.inputs.positions_B, step.inputs.slots_B
        self._note(self._storage)
        store_latents(
            rotated_NHR, latents_ND, self._norm_C, self._cos_sin_PR, positions_N, slots_N, out_NHR, kv_layer,
            self._shape, lines_ND, eps=self._epsilon, paired=self._paired, pdl=self._pdl,
        )  # fmt: skip
