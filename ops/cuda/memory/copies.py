"""`copy_pages`: copies whole pages of keys and values on a GPU, as they are shared until one request writes."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

__all__ = ["copy_pages"]


def copy_pages(pools: Sequence[Tensor], pairs: Sequence[tuple[int, int]]) -> None:
    """Copy pages (source, destination) in all layers; all sources are read before any page is written.

    Args:
        pools: Pages of all layers, [layers, pages, ...] in each pool, of any dtype.
        pairs: Numbers of pages.
    """
    if pairs:
        source, target = torch.tensor(pairs, dtype=torch.int64).to(pools[0].device, non_blocking=False).unbind(1)
        for pool in pools:
            for layer in pool.view(torch.uint8):  # an fp8 cache has no index_copy of its own
                layer.index_copy_(0, target, layer.index_select(0, source))
