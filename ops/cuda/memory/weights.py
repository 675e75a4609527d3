"""`WeightMemory`: tensors at addresses that never change, whose memory can be released and restored.

Owns the memory and, while it is released, a copy of its contents if wanted; knows nothing of what a tensor means.
Graphs keep the addresses that they were captured with, so that a model can sleep without a new capture.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from headrace.ops.cuda.memory.addresses import AddressRange, memory_grain
from headrace.ops.host_memory import host_pieces

__all__ = ["WeightMemory"]

_ALIGNMENT = 256  # bytes, the same as torch's own
_GRAINS = 16  # units of memory that are mapped at once, at least


class WeightMemory:
    """Tensors one behind another, made once and released only together."""

    def __init__(self, device: torch.device) -> None:
        """Reserve addresses for as much as the whole device holds.

        Args:
            device: The GPU.

        Raises:
            torch.OutOfMemoryError: The device has too little memory for the first piece.
        """
        grain = memory_grain(device)
        self._piece = _GRAINS * grain
        self._range = AddressRange(torch.cuda.mem_get_info(device)[1] // grain * grain, device)
        self._ends = [0]
        """Ends of the pieces of memory, in bytes."""
        self._is_backed = True
        self._back(self._piece)
        self._bytes = self._range.tensor()
        self.used = 0
        """Bytes up to the end of the last tensor."""
        self._copy: list[Tensor] = []

    @property
    def has_copy(self) -> bool:
        """Whether host memory holds the tensors' contents from their last release."""
        return bool(self._copy)

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Return the next tensor, uninitialised; after `rewind`, the same tensors come again in order.

        Raises:
            torch.OutOfMemoryError: The device has too little memory.
        """
        start = -(-self.used // _ALIGNMENT) * _ALIGNMENT
        end = start + math.prod(shape) * dtype.itemsize
        while self._ends[-1] < end:
            self._back(max(self._piece, -(-(end - self._ends[-1]) // self._piece) * self._piece))
        self.used = end
        return self._bytes[start:end].view(dtype).view(*shape)

    def rewind(self) -> None:
        """Start again from the first tensor."""
        self.used = 0

    def release(self, *, keep: bool) -> None:
        """Release the memory; nothing may use the tensors until `restore`. A second call may drop the copy.

        Args:
            keep: Whether to keep a copy in pinned host memory.

        Raises:
            torch.AcceleratorError: The host has too little memory to pin; nothing has changed.
        """
        if self._is_backed:
            if keep and not self._copy:
                self._copy = self._copied()
            self._range.settle()
            self._unback(len(self._ends))
            self._is_backed = False
        if not keep:
            self._copy = []

    def restore(self) -> bool:
        """Restore the memory; return whether it has its contents, too.

        Raises:
            torch.OutOfMemoryError: The device has too little memory; nothing has changed.
        """
        if self._is_backed:
            return True
        for index in range(1, len(self._ends)):
            try:
                self._range.back(self._ends[index - 1], self._ends[index] - self._ends[index - 1])
            except BaseException:
                self._unback(index)
                raise
        self._is_backed = True
        start = 0
        for chunk in self._copy:
            self._bytes[start : start + len(chunk)].copy_(chunk, non_blocking=True)
            start += len(chunk)
        return self.has_copy

    def drop_copy(self) -> None:
        """Drop the copy in host memory once the copies that were enqueued are done."""
        self._range.settle()
        self._copy = []

    def close(self) -> None:
        """Release everything; no tensor may be used any more."""
        self._copy = []
        self._range.close()

    def _copied(self) -> list[Tensor]:
        chunks, start = host_pieces(self.used, 1, pinned=True), 0
        for chunk in chunks:
            chunk.copy_(self._bytes[start : start + len(chunk)], non_blocking=True)
            start += len(chunk)
        return chunks

    def _back(self, size: int) -> None:
        self._range.back(self._ends[-1], size)
        self._ends.append(self._ends[-1] + size)

    def _unback(self, count: int) -> None:
        """Release the first pieces, up to the end number `count`."""
        for index in range(1, count):
            self._range.unback(self._ends[index - 1], self._ends[index] - self._ends[index - 1])
