"""`LatentWeights`: what makes keys and values of one layer's latent vectors, as it is stored; knows no device.

engine/model/network/mixers/latent.py has the equations and their letters. Shape letters beside those of `ops/paged.py`:
C elements of a latent vector c, R of the rotated key that all heads share, P of a head's query and key that are not
rotated, X = P + R, and V of a head's value.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from torch import Tensor

    from headrace.ops.formats import Stored

__all__ = ["LatentWeights"]


class LatentWeights(NamedTuple):
    """The matrices W_UK and W_UV of all heads, and the norm of latent vectors."""

    up: Stored
    """By head, W_UK above W_UV, dense: [H * (P + V), C]."""
    heads: int
    plain_dim: int
    """Elements P."""
    norm_C: Tensor
    """Weight of the RMS norm."""
    epsilon: float
    """Epsilon of the norm."""

    def split(self) -> tuple[Tensor, Tensor]:
        """Return views of (W_UK, [H, P, C]; W_UV, [H, V, C]), in the dtype in which they are stored."""
        up_HXC = self.up.parts["values"].view(self.heads, -1, len(self.norm_C))
        return up_HXC[:, : self.plain_dim], up_HXC[:, self.plain_dim :]
