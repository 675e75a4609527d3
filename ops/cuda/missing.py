"""`Missing`: operations of layers that no kernel computes; engines refuse such models by name before that."""

from __future__ import annotations

from typing import TYPE_CHECKING, NoReturn

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["Missing"]


class Missing:
    """Base of a GPU's operations, with those that it lacks."""

    def norm_values(self, qkv_NX: Tensor) -> NoReturn:
        """Raise `NotImplementedError`: no kernel norms values."""
        raise NotImplementedError(f"no kernel norms the values of {len(qkv_NX)} tokens")

    def attend_to_latents(
        self, queries_NHD: Tensor, latents_ND: Tensor, step: object, kv: Tensor, layer: int
    ) -> NoReturn:
        """Raise `NotImplementedError`: no kernel attends to latent vectors."""
        raise NotImplementedError(f"no kernel attends to the latent vectors of layer {layer}")
