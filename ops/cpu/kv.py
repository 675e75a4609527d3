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

__all__ = ["CpuKv"]


@dataclass(frozen=True, slots=True, eq=False)
class CpuKv:
    """Keys and values of all layers in pages, with the flat views that a layer reads and writes through."""

    pages_LPsKTD: Tensor
    """[layers, pages, 2 (key, value), K, T, D], zero at first so that unwritten places are finite."""
    rows: tuple[Tensor, ...]
    """Views of each layer as [pages * 2 * K, T * D]: one row is one head's keys, or values, of one page."""
    slots: tuple[Tensor, ...]
    """Views of each layer as [pages * 2 * K * T, D]: one row is one head's key, or value, of one token."""

    @staticmethod
    def allocate(shape: Sequence[int], dtype: torch.dtype) -> CpuKv:
        """Return zeroed pages of `shape`; the system gives each its memory when it is first written."""
        zeros = np.zeros(math.prod(shape) * dtype.itemsize, np.uint8)  # torch.zeros would touch every byte
        kv = torch.from_numpy(zeros).view(dtype).view(*shape)
        page_size, head_dim = shape[-2:]
        rows = tuple(layer.view(-1, page_size * head_dim) for layer in kv)
        return CpuKv(kv, rows, tuple(layer.view(-1, head_dim) for layer in kv))

    def resized(self, pages: int) -> CpuKv:
        """Return the same keys and values in another number of pages; pages beyond it are dropped."""
        old = self.pages_LPsKTD
        made = CpuKv.allocate((len(old), pages, *old.shape[2:]), old.dtype)
        kept = min(pages, old.shape[1])
        made.pages_LPsKTD[:, :kept].copy_(old[:, :kept])
        return made

    def copy_pages(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy whole pages (source, destination) in all layers; all sources are read before any page is written."""
        if pairs:
            source, target = torch.tensor(pairs).unbind(1)
            self.pages_LPsKTD.index_copy_(1, target, self.pages_LPsKTD.index_select(1, source))
