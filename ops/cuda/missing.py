"""`Missing`: operations of layers that no kernel computes; engines refuse such models by name before that."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

    from headrace.ops.cuda.latents.packed import CudaLatents
    from headrace.ops.latents import LatentWeights

__all__ = ["Missing"]


class Missing:
    """Base of a GPU's operations, with those that it lacks."""

    def norm_with(self, x_NC: Tensor, weight_C: Tensor, epsilon: float) -> Tensor:
        """Raise `NotImplementedError`: the operations of models with latent vectors are in latents/ops.py."""
        raise NotImplementedError(f"a model without latent vectors norms some of {x_NC.shape[-1]} elements")

    def pack_latents(self, weights: LatentWeights, layer: int) -> CudaLatents:
        """Raise `NotImplementedError`: the operations of models with latent vectors are in latents/ops.py."""
        raise NotImplementedError(f"pages of keys and values hold no latent vectors of layer {layer}")
