"""`HeadShape`: the shape of attention in one layer, the same for every way to compute it."""

from __future__ import annotations

import math

import torch

__all__ = ["HeadShape"]


class HeadShape:
    """Shape of one attention layer, the same for every way to compute it."""

    __slots__ = ("dtype", "head_dim", "heads", "kv_dtype", "kv_heads", "page_size", "scale", "window")

    def __init__(
        self,
        *,
        heads: int,
        kv_heads: int,
        head_dim: int,
        page_size: int = 16,
        dtype: torch.dtype = torch.bfloat16,
        kv_dtype: torch.dtype | None = None,
        scale: float | None = None,
        window: int | None = None,
    ) -> None:
        """Set the sizes: `scale` multiplies q.k, None for 1/sqrt(D); `window` counts visible tokens and the new one."""
        self.heads, self.kv_heads, self.head_dim, self.page_size = heads, kv_heads, head_dim, page_size
        self.dtype, self.kv_dtype = dtype, dtype if kv_dtype is None else kv_dtype
        self.scale = 1.0 / math.sqrt(head_dim) if scale is None else scale
        self.window = window

    @property
    def page_bytes(self) -> int:
        """Bytes of one layer's keys and values in a page."""
        return 2 * self.page_size * self.kv_heads * self.head_dim * self.kv_dtype.itemsize
