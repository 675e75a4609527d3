"""Puts the heads of an adapter's queries and keys in the order in which a device rotates them.

Adapters hold a head's elements as the model's authors order them. Where a device has them in another order
(`ModelShape.head_places`), it has the rows of the base weights in that order, and updates must follow.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from headrace.adapters.layout import BlockLayout, ModelShape

__all__ = ["order_heads", "ordered"]


def ordered(heads_XD: Tensor, shape: ModelShape) -> Tensor:
    """Return heads, [..., head_dim], in the device's order; they themselves where that is the files'."""
    if shape.head_places is None:
        return heads_XD
    sources_D = torch.from_numpy(np.argsort(shape.head_places)).to(heads_XD.device)
    return heads_XD.index_select(-1, sources_D)


def order_heads(block: Tensor, layout: BlockLayout) -> None:
    """Put the updates of queries and keys in an unpacked block, [layout.elements], in the device's order, in place."""
    if layout.shape.head_places is None:
        return
    for first, count in layout.head_spans():
        heads_XD = block[first : first + count].view(-1, layout.shape.head_dim)
        heads_XD.copy_(ordered(heads_XD, layout.shape))
