"""`PoolMemory`: the pages of all layers of a model on a GPU, in a pool for each shape that a layer's pages have.

A page has the same number in all pools, and so has the scratch page. Never reads or writes a key or value. Next to
read: pages.py.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from headrace.ops.cuda.memory.pages import PageMemory, scratch_after

if TYPE_CHECKING:
    from torch import Tensor

    from headrace.ops.paged import KvLayout

__all__ = ["PoolMemory"]


class PoolMemory:
    """Pages of all layers, and one scratch page for rows that pad a batch."""

    def __init__(self, layout: KvLayout, dtype: torch.dtype, num_pages: int, device: torch.device) -> None:
        """Reserve addresses for as many pages as the whole device could hold, and memory for `num_pages`.

        Args:
            layout: Pools, and the place of each layer in them.
            dtype: Dtype of keys and values.
            num_pages: Number of pages that have memory at first, as for `resize`.
            device: The GPU.

        Raises:
            torch.OutOfMemoryError: The device has too little memory.
        """
        self.most_pages = torch.cuda.mem_get_info(device)[1] // layout.page_bytes(dtype)
        """Largest number of pages for `resize`."""
        sizes = [math.prod(shape) * dtype.itemsize for _, shape in layout.pools]
        self.scratch_page = max(scratch_after(self.most_pages, size, device) for size in sizes)
        """Number of the extra page, which always has memory."""
        self._pages, self._memories = 0, list[PageMemory]()
        try:
            for layers, shape in layout.pools:
                most, scratch = self.most_pages, self.scratch_page
                memory = PageMemory(layers, shape, dtype, device, most_pages=most, scratch_page=scratch)
                self._memories.append(memory)
            self.resize(num_pages)
        except BaseException:
            self.close()
            raise
        self.pools: tuple[Tensor, ...] = tuple(memory.kv for memory in self._memories)
        """Pages of each pool, [layers, pages, ...]; the scratch page and those of the last `resize` have memory."""
        self.layers: tuple[Tensor, ...] = tuple(self.pools[pool][number] for pool, number in layout.places)
        """Pages of each layer, [pages, ...]; layers that share what they store have the same."""

    def resize(self, num_pages: int) -> None:
        """Give memory to pages 0 .. num_pages - 1; new memory is zero, and pages that stay are unchanged.

        Raises:
            torch.OutOfMemoryError: The device has too little memory; nothing has changed.
        """
        for done, memory in enumerate(self._memories):
            try:
                memory.resize(num_pages)
            except torch.OutOfMemoryError:
                for other in self._memories[:done]:
                    other.resize(self._pages)
                raise
        self._pages = num_pages

    def close(self) -> None:
        """Release everything; no page may be used any more, even if tensors over them are left."""
        for memory in self._memories:
            memory.close()
