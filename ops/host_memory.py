"""`host_pieces`: host memory that a GPU copies from and to, and `PiecePool`, which lends such memory; never copies.

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
    """Return uint8 memory for `units` units, each within one piece; all pieces but the last hold equally many.

    Raises:
        RuntimeError: The host has too little memory, or too little that can be page-locked.
    """
    most = max(1, _PIECE_BYTES // unit_bytes)
    return [
        torch.empty(min(most, units - start) * unit_bytes, dtype=torch.uint8, pin_memory=pinned)
        for start in range(0, units, most)
    ]


class Loan(list[Tensor]):
    """Pieces that are in use until this list is dropped."""


class PiecePool:
    """Page-locked memory in pieces of one size, which return to the pool once their loan is dropped."""

    def __init__(self, nbytes: int, piece_bytes: int) -> None:
        """Allocate the memory.

        Raises:
            RuntimeError: The host has too little memory that can be page-locked.
        """
        self._piece_bytes = piece_bytes
        self._memory = host_pieces(nbytes // piece_bytes, piece_bytes, pinned=True)
        self._free = deque(piece for memory in self._memory for piece in memory.split(piece_bytes))
        """Free pieces, which any thread takes and adds without a lock, even from within the garbage collector."""

    def take(self, nbytes: int) -> Loan:
        """Lend pieces that hold `nbytes`; the pool grows if it has too few. Any thread may call this.

        Raises:
            RuntimeError: The host has too little memory that can be page-locked.
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
