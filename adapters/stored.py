"""`Stored`: an adapter's low-rank updates as their file holds them, and how they become its block; opens no file.

A device that can put numbers in their places by itself is given the file's bytes as they are: then reading an adapter
again is nothing but that, without a look at any tensor. Next to read: recipe.py, ../ops/cuda_unpack.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from hashlib import blake2b
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from headrace.adapters.layout import BlockLayout

__all__ = ["DTYPES", "PIECE_BYTES", "Part", "Recipe", "Span", "Stored"]

PIECE_BYTES = 2 << 20
"""Of the memory that holds what was read, where it comes in pieces."""
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
"""What tensors may be stored in, by `Part.KIND`."""
_BITS: tuple[tuple[type[np.signedinteger[Any]], int], ...] = (
    (np.int32, 0x7FFFFFFF),
    (np.int16, 0x7FFF),
    (np.int16, 0x7FFF),
)
"""For each of them, a type of its size and the bits of its magnitude, which grow with it."""


class Part(IntEnum):
    """Columns of `Recipe.parts`. A part is a run of a stored matrix's elements, row after row, in one piece."""

    AT = 0
    """Its first byte in memory."""
    FIRST = 1
    """Which of the matrix's elements is its first."""
    COUNT = 2
    COLUMNS = 3
    """Of the matrix."""
    TO = 4
    """Where the matrix begins in the block, in elements."""
    DOWN = 5
    """From one row's to the next in the block."""
    ALONG = 6
    """From one column's to the next in the block."""
    KIND = 7
    """The place of its dtype among `DTYPES`."""


@dataclass(frozen=True, slots=True)
class Span:
    """Bytes of a file, and where in memory they go."""

    offset: int
    nbytes: int
    at: int


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class Recipe:
    """How a file's bytes become the block of an adapter."""

    layout: BlockLayout
    elements: int
    """Of the block."""
    spans: tuple[Span, ...]
    """What is read."""
    nbytes: int
    """Memory that they take."""
    parts: NDArray[np.int64]
    """[parts, 8]: see `Part`, in the order of memory."""
    scales: NDArray[np.float32]
    """[parts]: what each is multiplied by."""
    is_padded: bool
    """Not all of the block is written: the rest is zeros."""


@dataclass(frozen=True, slots=True, eq=False)
class Stored:
    """What a recipe's spans hold."""

    recipe: Recipe
    dtype: torch.dtype
    """Of the block."""
    pieces: Sequence[Tensor]
    """uint8: one that holds everything, or several of `PIECE_BYTES`, one behind another."""

    @property
    def nbytes(self) -> int:
        """Memory of the block."""
        return self.recipe.elements * self.dtype.itemsize

    def unpack(self) -> Tensor:
        """The block, each number scaled in float32 and rounded once; only of what lies in one piece."""
        recipe = self.recipe
        block = (torch.zeros if recipe.is_padded else torch.empty)(recipe.elements, dtype=self.dtype)
        for index, line in enumerate(recipe.parts.tolist()):
            columns, to, down, along = line[Part.COLUMNS : Part.KIND]
            source = self._values(index).view(-1, columns)
            target = block.as_strided(source.shape, (down, along), to)
            scale = float(recipe.scales[index])
            target.copy_(source if scale == 1.0 else source.float() * scale)
        return block

    def first_not_finite(self) -> int | None:
        """The first part with a number that is not finite, or not once it is scaled and rounded; None if all are."""
        largest = torch.empty(len(self.recipe.parts))
        for index, kind in enumerate(self.recipe.parts[:, Part.KIND].tolist()):
            as_int, magnitude = _BITS[kind]
            bits: NDArray[Any] = self._values(index).view(torch.uint8).numpy().view(as_int)
            found = np.bitwise_and(bits, as_int(magnitude)).max(keepdims=True)
            largest[index] = torch.from_numpy(found).view(DTYPES[kind])[0]
        scaled = (largest * torch.from_numpy(self.recipe.scales)).to(self.dtype)
        wrong = torch.isfinite(scaled).logical_not_().nonzero()
        return int(wrong[0]) if len(wrong) else None

    def digest(self, kind: str) -> bytes:
        """32 bytes that stand for the block's content, wherever in the file it was, as an adapter of a kind."""
        parts, scales = self.recipe.parts, self.recipe.scales
        order = np.lexsort((parts[:, Part.FIRST], parts[:, Part.TO]))
        whole = order[parts[order, Part.FIRST] == 0]
        digest = blake2b(f"{kind} {self.dtype}".encode(), digest_size=32)
        digest.update(self.recipe.layout.ranks.tobytes())
        digest.update(parts[whole, Part.COLUMNS :].tobytes() + scales[whole].tobytes())
        for index in order.tolist():
            digest.update(self._values(index).view(torch.uint8).numpy().data)
        return digest.digest()

    def _values(self, index: int) -> Tensor:
        """The numbers of a part, as they are stored."""
        line = self.recipe.parts[index]
        dtype = DTYPES[line[Part.KIND]]
        piece, start = divmod(int(line[Part.AT]), PIECE_BYTES) if len(self.pieces) > 1 else (0, int(line[Part.AT]))
        return self.pieces[piece][start : start + int(line[Part.COUNT]) * dtype.itemsize].view(dtype)
