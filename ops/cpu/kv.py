"""`CpuKv`: the pages of keys and values in host memory; never picks pages."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from headrace.ops.paged import KvLayout

__all__ = ["CpuKv"]


@dataclass(frozen=True, slots=True, eq=False)
class CpuKv:
    """Keys and values of all layers in pages, with the flat views that a layer reads and writes through."""

    layout: KvLayout
    pools: tuple[Tensor, ...]
    """Pages of each pool, [layers, pages, 2, K, T, D], zero at first so that unwritten places are finite."""
    rows: tuple[Tensor, ...]
    """Views of each layer as [pages * 2 * K, T * D]: one row is one head's keys, or values, of one page."""
    slots: tuple[Tensor, ...]
    """Views of each layer as [pages * 2 * K * T, D]: one row is one head's key, or value, of one token."""

    @staticmethod
    def allocate(layout: KvLayout, pages: int, dtype: torch.dtype) -> CpuKv:
        """Return zeroed pages; the system gives each its memory when it is first written."""
        pools = tuple(_zeros((count, pages, *shape), dtype) for count, shape in layout.pools)
        layers = [pools[pool][number] for pool, number in layout.places]
        rows = tuple(layer.view(-1, layer.shape[-2] * layer.shape[-1]) for layer in layers)
        return CpuKv(layout, pools, rows, tuple(layer.view(-1, layer.shape[-1]) for layer in layers))

    @property
    def num_pages(self) -> int:
        """Number of pages, the same in all pools."""
        return self.pools[0].shape[1]

    @property
    def page_bytes(self) -> int:
        """Memory of one page over all layers, in bytes."""
        return self.layout.page_bytes(self.pools[0].dtype)

    def resized(self, pages: int) -> CpuKv:
        """Return the same keys and values in another number of pages; pages beyond it are dropped."""
        made = CpuKv.allocate(self.layout, pages, self.pools[0].dtype)
        kept = min(pages, self.num_pages)
        for new, old in zip(made.pools, self.pools, strict=True):
            new[:, :kept].copy_(old[:, :kept])
        return made

    def copy_pages(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy whole pages (source, destination) in all layers; all sources are read before any page is written."""
        if pairs:
            source, target = torch.tensor(pairs).unbind(1)
            for pool in self.pools:
                pool.index_copy_(1, target, pool.index_select(1, source))


def _zeros(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    zeros = np.zeros(math.prod(shape) * dtype.itemsize, np.uint8)  # torch.zeros would touch every byte
    return torch.from_numpy(zeros).view(dtype).view(*shape)
