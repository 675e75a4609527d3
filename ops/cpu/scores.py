"""How the scores of attention become weights of values: `Scores`, by softmax, and `Weigh`, for variants."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias

import torch

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

__all__ = ["Scores", "Weigh"]

Weigh: TypeAlias = "Callable[[Tensor, Tensor, float], Tensor]"
"""Turns products of queries and keys, a mask of 0 or -inf to add, and the scale into weights of values: a variant of
attention. The last dimension is the keys; the mask broadcasts."""


class Scores:
    """Softmax over the keys and, in layers that have sinks, over one more score of each head, without a value."""

    def __init__(self, kv_heads: int, group: int) -> None:
        """Expect `kv_heads` key heads, each shared by `group` query heads."""
        self._shape = (kv_heads, group, 1)
        self._sinks: dict[int, Tensor] = {}

    def keep_sinks(self, layer: int, sinks_H: Tensor) -> None:
        """Take the sinks of a layer's heads, float32."""
        self._sinks[layer] = sinks_H.view(self._shape)

    def weights(self, scores: Tensor, layer: int, *, is_block: bool) -> Tensor:
        """Return the weights of values.

        Args:
            scores: Scaled and masked, [K, G, C, S] of a block of C queries, or [R, K, G, S] of R rows.
            layer: Number of the layer.
            is_block: Which of the two they are.
        """
        sinks = self._sinks.get(layer)
        if sinks is None:
            return torch.softmax(scores, -1)
        sinks = (sinks.unsqueeze(-1) if is_block else sinks).to(scores.dtype)
        added = torch.cat((scores, sinks.expand(*scores.shape[:-1], 1)), -1)
        return torch.softmax(added, -1)[..., :-1].contiguous()
