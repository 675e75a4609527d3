"""`LatentShape`: the shape of attention to latent vectors, as attention to one key head that has no values."""

from __future__ import annotations

import torch

from headrace.ops.cuda.attention.shape import HeadShape

__all__ = ["LatentShape"]


class LatentShape(HeadShape):
    """Shape of one layer's attention to latent vectors; `head_dim` is the elements of a token in the cache, C + R."""

    __slots__ = ("latent_dim", "rotated_dim")

    def __init__(
        self,
        *,
        heads: int,
        latent_dim: int,
        rotated_dim: int,
        scale: float,
        page_size: int = 16,
        dtype: torch.dtype = torch.bfloat16,
    ) -> None:
        """Set the sizes: `latent_dim` is C, `rotated_dim` R, and `scale` multiplies the scores."""
        size = latent_dim + rotated_dim
        super().__init__(heads=heads, kv_heads=1, head_dim=size, page_size=page_size, dtype=dtype, scale=scale)
        self.latent_dim, self.rotated_dim = latent_dim, rotated_dim

    @property
    def page_bytes(self) -> int:
        """Bytes of one layer's vectors in a page."""
        return self.page_size * self.head_dim * self.kv_dtype.itemsize
