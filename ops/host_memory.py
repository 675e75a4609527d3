"""`host_pieces`: host memory that a GPU copies from and to, and `PiecePool`, which lends it; never copies anything.

torch rounds page-locked memory up to a power of two, so that one large piece could waste half.
"""

from __future__ import annotations

import weakref
from collections import deque

import torch
from torch import Tensor

__all__ = ["PiecePool", "host_pieces"]

_PIECE_BYTES = 64 << 20


def host_pieces(units: int, unit_bytes: int, *, pinned: bool) -> list[Tensor]:
    """Memory for so many units, none of which lies in two pieces: uint8, as many units in each piece but the last.

    Raises:
        RuntimeError: The host has not so much memory, or not so much that can be page-locked.
    """
    most = max(1, _PIECE_BYTES // unit_bytes)
    return [
        torch.empty(min(most, units - start) * unit_bytes, dtype=torch.uint8, pin_memory=pinned)
        for start in range(0, units, most)
    ]


class Loan(list[Tensor]):
    """Pieces in use until this is dropped."""


class PiecePool:
    """Page-locked memory in pieces of one size, which come back by themselves."""

    def __init__(self, nbytes: int, piece_bytes: int) -> None:
        """Take the memory.

        Raises:
            RuntimeError: The host has not so much memory that can be page-locked.
        """
        self._piece_bytes = piece_bytes
        self._memory = host_pieces(nbytes // piece_bytes, piece_bytes, pinned=True)
        self._free = deque(piece for memory in self._memory for piece in memory.split(piece_bytes))
        """Taken from and added to by any thread, also by one that the garbage collector interrupts: without a lock."""

    def take(self, nbytes: int) -> Loan:
        """Pieces of `piece_bytes` for so many bytes; the pool grows if it has too few. From any thread.

        Raises:
            RuntimeError: The host has not so much memory that can be page-locked.
        """
        loan = Loan()
        weakref.finalize(loan, self._free.extend, given := list[Tensor]()).atexit = False
        for _ in range(-(-nbytes // self._piece_bytes)):
            try:
                piece = self._free.popleft()
            except IndexError:
                piece = torch.empty(self._piece_bytes, dtype=torch.uint8, pin_memory=True)
                self._memory.append(piece)
            given.append(piece)
        loan.extend(given)
        return loan
