"""`PageMemory`: pages of layers at addresses that never change, of which as many have memory as are needed.

Owns a range of the device's addresses and the memory behind it; never reads or writes a key or value. Graphs keep the
addresses that they were captured with, so that pages can come and go without a new capture.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from headrace.ops.cuda.memory.addresses import AddressRange, memory_grain

__all__ = ["PageMemory", "scratch_after"]

_PIECES = 32  # of a layer's new memory that can be released one by one


class PageMemory:
    """Pages of some layers that have one shape, and one scratch page for rows that pad a batch."""

    def __init__(
        self,
        layers: int,
        page_shape: Sequence[int],
        dtype: torch.dtype,
        device: torch.device,
        *,
        most_pages: int,
        scratch_page: int,
    ) -> None:
        """Reserve addresses for `most_pages` pages, and give memory to the scratch page.

        Args:
            layers: Number of layers.
            page_shape: Shape of a page in one layer.
            dtype: Dtype of keys and values.
            device: The GPU.
            most_pages: Largest number of pages for `resize`.
            scratch_page: Number of the scratch page, from `scratch_after` of this memory or of another on.

        Raises:
            torch.OutOfMemoryError: The device has too little memory.
        """
        self._layers, self._page = layers, math.prod(page_shape) * dtype.itemsize
        self._grain = memory_grain(device)
        self._most_pages = most_pages
        below = scratch_page * self._page // self._grain * self._grain
        self._span = self._whole((scratch_page + 1) * self._page)
        self._ends = [0, self._grain]
        """Ends of the pieces of memory, in bytes, the same in every layer."""
        self._range = AddressRange(layers * self._span, device)
        self._back(*self._ends)
        self._back(below, self._span)
        self._bytes = self._range.tensor()
        strides = [self._page // dtype.itemsize]
        for size in page_shape:
            strides.append(strides[-1] // size)
        self.kv = self._bytes.view(dtype).as_strided(
            (layers, scratch_page + 1, *page_shape), (self._span // dtype.itemsize, *strides)
        )
        """Pages, [layers, pages, *page_shape]; only those of the last `resize` and the scratch page have memory."""
        self._clear(*self._ends)
        self._clear(below, self._span)

    def resize(self, num_pages: int) -> None:
        """Give memory to pages 0 .. num_pages - 1; new memory is zero, and pages that stay are unchanged.

        Only whole pieces are released: up to a 32nd of the memory that an earlier call added may stay.

        Raises:
            torch.OutOfMemoryError: The device has too little memory; nothing has changed.
        """
        if num_pages > self._most_pages:
            raise torch.OutOfMemoryError(f"{num_pages} pages are more than the device's {self._most_pages}")
        before, wanted = self._ends[-1], num_pages * self._page
        piece = self._whole((wanted - before) // _PIECES)
        try:
            while self._ends[-1] < wanted:
                start = self._ends[-1]
                end = start + min(piece, self._whole(wanted - start))
                self._back(start, end)
                self._ends.append(end)
                self._clear(start, end)
        except torch.OutOfMemoryError:
            wanted = before
            raise
        finally:
            self._release(wanted)

    def close(self) -> None:
        """Release everything; no page may be used any more, even if tensors over them are left."""
        self._range.close()

    # -- inside -------------------------------------------------------------------------------------------------------

    def _whole(self, size: int) -> int:
        """Return `size` rounded up to whole units of memory."""
        return max(1, -(-size // self._grain)) * self._grain

    def _back(self, start: int, end: int) -> None:
        """Map memory to the same part of every layer, or of none."""
        for layer in range(self._layers):
            try:
                self._range.back(layer * self._span + start, end - start)
            except BaseException:
                self._unback(start, end, layer)
                raise

    def _unback(self, start: int, end: int, layers: int) -> None:
        for layer in range(layers):
            self._range.unback(layer * self._span + start, end - start)

    def _release(self, wanted: int) -> None:
        """Release the pieces of memory behind the first `wanted` bytes of each layer."""
        if len(self._ends) > 2 and self._ends[-2] >= wanted:
            self._range.settle()  # a piece that was just added may still be cleared
        while len(self._ends) > 2 and self._ends[-2] >= wanted:
            end = self._ends.pop()
            self._unback(self._ends[-1], end, self._layers)

    def _clear(self, start: int, end: int) -> None:
        for layer in range(self._layers):
            self._bytes[layer * self._span + start : layer * self._span + end].zero_()


def scratch_after(most_pages: int, page_bytes: int, device: torch.device) -> int:
    """Return the least number that a scratch page may have behind `most_pages` pages, all of `page_bytes` in a layer.

    Its memory is in units that none of these pages needs.
    """
    grain = memory_grain(device)
    return -(-max(1, -(-most_pages * page_bytes // grain)) * grain // page_bytes)
