"""`HeadShape`: the shape of attention in one layer, the same for every way to compute it."""

from __future__ import annotations

import math
from collections.abc import Hashable
from typing import Literal, TypeAlias

import torch

__all__ = ["HeadShape", "Values"]

Values: TypeAlias = Literal["products", "normed", "normed keys", "stored"]
"""Where values come from: they are products as they are; or products with an RMS norm of each head, without weights; or
such norms of keys, before the norms and the rotation of these; or keys and values are an earlier layer's, and a layer
stores none."""


class HeadShape:
    """Shape of one attention layer, the same for every way to compute it."""

    __slots__ = (
        "cap", "dtype", "has_sinks", "head_dim", "heads", "kv_dtype", "kv_heads", "page_size", "scale", "values",
        "window",
    )  # fmt: skip

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
        cap: float | None = None,
        has_sinks: bool = False,
        values: Values = "products",
    ) -> None:
        """Set the sizes.

        Args:
            heads: Query heads.
            kv_heads: Key heads, each shared by a group of query heads.
            head_dim: Elements of a head.
            page_size: Tokens of a page.
            dtype: Dtype of queries and results.
            kv_dtype: Dtype of keys and values in pages; None for `dtype`.
            scale: Factor of q.k, None for 1/sqrt(D).
            window: Number of tokens that are seen, the new one included; None for all.
            cap: Bound c of scores s, which become c tanh(s / c); None for no bound.
            has_sinks: Whether each query head has a score without a value beside those of the keys.
            values: Where the values come from that a step stores.
        """
        self.heads, self.kv_heads, self.head_dim, self.page_size = heads, kv_heads, head_dim, page_size
        self.dtype, self.kv_dtype = dtype, dtype if kv_dtype is None else kv_dtype
        self.scale = 1.0 / math.sqrt(head_dim) if scale is None else scale
        self.window, self.cap, self.has_sinks, self.values = window, cap, has_sinks, values

    @property
    def key(self) -> Hashable:
        """What attention of one model's layers differs by, once keys and values are stored; equal where it is alike."""
        return self.heads, self.kv_heads, self.head_dim, self.window, self.scale, self.cap, self.has_sinks

    @property
    def page_bytes(self) -> int:
        """Bytes of one layer's keys and values in a page."""
        return 2 * self.page_size * self.kv_heads * self.head_dim * self.kv_dtype.itemsize
