"""`Stored`: an adapter's low-rank updates as their file holds them, and their way into its block; opens no file.

A device that can put numbers in their places by itself is given the file's bytes as they are: reading an adapter again
is then reading bytes alone, without a look at any tensor. Next to read: recipe.py, ops/cuda/memory/unpack.py.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum
from hashlib import blake2b
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from headrace.adapters.layout import BlockLayout

__all__ = ["DTYPES", "PIECE_BYTES", "Part", "Recipe", "Span", "Stored", "cut"]

PIECE_BYTES = 2 << 20
"""Bytes of one piece of memory, where the bytes of a file are held in pieces."""
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
"""Dtypes in which tensors may be stored, in the order of `Part.KIND`."""
_BITS: tuple[tuple[type[np.signedinteger[Any]], int], ...] = (
    (np.int32, 0x7FFFFFFF),
    (np.int16, 0x7FFF),
    (np.int16, 0x7FFF),
)
"""Integer type of the same size for each of `DTYPES`, and the mask of its magnitude's bits."""


class Part(IntEnum):
    """Columns of `Recipe.parts`. A part is a run of a stored matrix's elements, row after row, in one piece."""

    AT = 0
    """Offset in memory of the part's first byte."""
    FIRST = 1
    """Index in the matrix of the part's first element."""
    COUNT = 2
    COLUMNS = 3
    """Number of the matrix's columns."""
    TO = 4
    """Index in the block of the matrix's first element."""
    DOWN = 5
    """Elements in the block between one row of the matrix and the next."""
    ALONG = 6
    """Elements in the block between one column of the matrix and the next."""
    KIND = 7
    """Index of the part's dtype in `DTYPES`."""


@dataclass(frozen=True, slots=True)
class Span:
    """A run of bytes of a file, and the place in memory that they are read to."""

    offset: int
    nbytes: int
    at: int


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class Recipe:
    """The way from a file's bytes to the block of an adapter."""

    layout: BlockLayout
    elements: int
    """Number of elements of the block."""
    spans: tuple[Span, ...]
    """Bytes of the file that are read."""
    nbytes: int
    """Bytes of memory that the spans take."""
    parts: NDArray[np.int64]
    """[parts, 8]: the columns of `Part`, in the order of memory."""
    scales: NDArray[np.float32]
    """[parts]: factor of each part."""
    names: tuple[str, ...]
    """[parts]: name of each part's tensor."""
    is_padded: bool
    """Whether some elements of the block are not written and stay zero."""


@dataclass(frozen=True, slots=True, eq=False)
class Stored:
    """The bytes that were read for a recipe."""

    recipe: Recipe
    dtype: torch.dtype
    """Dtype of the block."""
    pieces: Sequence[Tensor]
    """uint8 memory: one tensor that holds everything, or several of `PIECE_BYTES`, one after another."""

    @property
    def nbytes(self) -> int:
        """Bytes of the unpacked block."""
        return self.recipe.elements * self.dtype.itemsize

    def unpack(self) -> Tensor:
        """Return the block, each number scaled in float32 and rounded once; needs bytes that lie in one piece."""
        recipe = self.recipe
        block = (torch.zeros if recipe.is_padded else torch.empty)(recipe.elements, dtype=self.dtype)
        for index, line in enumerate(recipe.parts.tolist()):
            columns, to, down, along = line[Part.COLUMNS : Part.KIND]
            source = self._values(index).view(-1, columns)
            target = block.as_strided(source.shape, (down, along), to)
            scale = float(recipe.scales[index])
            target.copy_(source if scale == 1.0 else source.float() * scale)
        return block

    def first_not_finite(self) -> str | None:
        """Return the first tensor with a number that is not finite as stored, or once scaled and rounded; None if all
        are."""
        recipe, kinds = self.recipe, set(self.recipe.parts[:, Part.KIND].tolist())
        if len(kinds) == 1:  # nearly always: the largest number decides for all
            (kind,) = kinds
            largest = torch.cat([_largest(memory, kind) for _, memory in self.stretches()]).amax(0, keepdim=True)
            if self._stay_finite(largest, np.abs(recipe.scales).max(keepdims=True)).all():
                return None
        each = [_largest(self._values(index), kind) for index, kind in enumerate(recipe.parts[:, Part.KIND].tolist())]
        wrong = self._stay_finite(torch.cat(each), recipe.scales).logical_not_().nonzero()
        return recipe.names[int(wrong[0])] if len(wrong) else None

    def digest(self, kind: str) -> bytes:
        """Return 32 bytes that stand for an adapter of `kind`: the same for files of the same tensors in the same
        order."""
        parts, scales = self.recipe.parts, self.recipe.scales
        whole = parts[:, Part.FIRST] == 0
        columns = [Part.AT, *range(Part.COLUMNS, len(Part))]
        digest = blake2b(f"{kind} {self.dtype}".encode(), digest_size=32)
        digest.update(self.recipe.layout.ranks.tobytes())
        digest.update(parts[whole][:, columns].tobytes() + scales[whole].tobytes())
        for _, memory in self.stretches():
            digest.update(memory.numpy().data)
        return digest.digest()

    def stretches(self) -> Iterator[tuple[int, Tensor]]:
        """Yield (offset in the file, uint8 memory) for all that is read, each at most one piece long."""
        for span in self.recipe.spans:
            for start, stop in cut(span.at, span.at + span.nbytes):
                yield span.offset + start - span.at, self._memory(start, stop)

    def _values(self, index: int) -> Tensor:
        """Return the numbers of a part as they are stored."""
        at, _, count, *_, kind = self.recipe.parts[index].tolist()
        return self._memory(at, at + count * DTYPES[kind].itemsize).view(DTYPES[kind])

    def _memory(self, start: int, stop: int) -> Tensor:
        piece = start // PIECE_BYTES if len(self.pieces) > 1 else 0
        return self.pieces[piece][start - piece * PIECE_BYTES : stop - piece * PIECE_BYTES]

    def _stay_finite(self, largest: Tensor, scales: NDArray[np.float32]) -> Tensor:
        return torch.isfinite((largest * torch.from_numpy(scales)).to(self.dtype))


def cut(start: int, stop: int) -> Iterator[tuple[int, int]]:
    """Yield the runs of bytes from `start` to `stop` that lie in one piece each."""
    while start < stop:
        end = min(stop, (start // PIECE_BYTES + 1) * PIECE_BYTES)
        yield start, end
        start = end


def _largest(values: Tensor, kind: int) -> Tensor:
    """Return [1] float32: the largest magnitude among `values`, infinite or NaN if one of them is."""
    as_int, magnitude = _BITS[kind]
    bits: NDArray[Any] = values.view(torch.uint8).numpy().view(as_int)
    found = np.bitwise_and(bits, as_int(magnitude)).max(keepdims=True)
    return torch.from_numpy(found).view(DTYPES[kind]).float()
