"""`Format`, a way to store a weight in tensors, and `Stored`, a weight stored so; never reads files or multiplies.

A weight has the shape [..., out, in]: a matrix, or a stack of matrices such as those of experts. A format names the
tensors that hold it, its parts, and `Format.dense` gives the numbers that they stand for. That is the specification:
whatever a product kernel makes of the parts, its results are compared with those of the dense weight.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import TYPE_CHECKING, Protocol

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from torch import Tensor

__all__ = ["Dense", "Format", "Int4Groups", "PartSpec", "Stacked", "Stored", "joins", "row_blocks"]

_VALUES = "values"
_BLOCK_ELEMENTS = 1 << 16  # float32 elements: an eighth or less of a core's cache


@dataclass(frozen=True, slots=True)
class PartSpec:
    """Shape and dtype of one tensor of a stored weight."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    outputs: int | None = 1
    """Outputs of the weight that share one slice of the part, 128 for scales of 128 outputs each. The part's slices lie
    along the same dimension as the weight's outputs. None: the part belongs to the whole weight."""

    @property
    def nbytes(self) -> int:
        """Size of the part in bytes."""
        return math.prod(self.shape) * self.dtype.itemsize


class Format(Protocol):
    """Protocol of a way to store weights. Formats are hashable values: two that are equal store in the same way."""

    @property
    def name(self) -> str:
        """Short name for messages and tables."""
        ...

    def parts(self, shape: tuple[int, ...]) -> Mapping[str, PartSpec]:
        """Return the parts of a weight of `shape`.

        Raises:
            ValueError: The format cannot hold a weight of this shape.
        """
        ...

    def dense(self, parts: Mapping[str, Tensor], shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Return the weight [..., out, in] that `parts` stand for, rounded once to `dtype`."""
        ...


@dataclass(frozen=True, slots=True)
class Dense:
    """Every element by itself, in a floating-point dtype."""

    dtype: torch.dtype

    @property
    def name(self) -> str:
        """The name of the dtype."""
        return str(self.dtype).removeprefix("torch.")

    def parts(self, shape: tuple[int, ...]) -> Mapping[str, PartSpec]:
        """Return the one part, `values`, which has the weight's shape."""
        return {_VALUES: PartSpec(shape, self.dtype)}

    def dense(self, parts: Mapping[str, Tensor], _shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Return the values; they are not copied if they have the dtype already."""
        return parts[_VALUES].to(dtype)


@dataclass(frozen=True, slots=True)
class Int4Groups:
    """Groups of inputs with one scale and one minimum: `w = values * scale + minimum`, exact for GGUF Q4_0 and Q4_1."""

    group: int = 32
    """Inputs that share one scale and one minimum."""

    @property
    def name(self) -> str:
        """The name of the format with the size of its groups."""
        return f"int4-g{self.group}"

    def parts(self, shape: tuple[int, ...]) -> Mapping[str, PartSpec]:
        """Return `values` from 0 to 15, one in a byte, and float32 `scale` and `minimum` [..., out, in / group].

        Raises:
            ValueError: The inputs are not whole groups.
        """
        *outer, ins = shape
        if not outer or ins % self.group:
            raise ValueError(f"groups of {self.group} need inputs in a multiple of {self.group}, got shape {shape}")
        constants = PartSpec((*outer, ins // self.group), torch.float32)
        return {_VALUES: PartSpec(shape, torch.uint8), "scale": constants, "minimum": constants}

    def dense(self, parts: Mapping[str, Tensor], shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Return the weight, computed in float32 and rounded once."""
        values_OI, scale_OG, minimum_OG = (parts[name].flatten(0, -2) for name in (_VALUES, "scale", "minimum"))
        dense_OI = torch.empty(values_OI.shape, dtype=dtype, device=values_OI.device)
        blocks = row_blocks(*values_OI.shape)
        most = min(blocks[0].stop, len(dense_OI)) if blocks else 0
        # One buffer for all blocks: the system would zero the pages of each new one.
        scratch_OGg = torch.empty(most, scale_OG.shape[1], self.group, device=values_OI.device)
        for rows in blocks:
            few_OI = values_OI[rows]
            block_OGg = scratch_OGg[: len(few_OI)]
            block_OGg.copy_(few_OI.view(block_OGg.shape))
            block_OGg.mul_(scale_OG[rows].unsqueeze(-1)).add_(minimum_OG[rows].unsqueeze(-1))
            dense_OI[rows].copy_(block_OGg.flatten(1))
        return dense_OI.view(shape)


@dataclass(frozen=True, slots=True)
class Stacked:
    """Weights that read the same inputs, one above the other, each in a format of its own."""

    pieces: tuple[tuple[Format, int], ...]
    """Format and number of outputs of each weight, in order."""

    @property
    def name(self) -> str:
        """The names of the formats, in order."""
        return " + ".join(format.name for format, _ in self.pieces)

    def parts(self, shape: tuple[int, ...]) -> Mapping[str, PartSpec]:
        """Return the parts of all pieces, under names that begin with the number of the piece.

        Raises:
            ValueError: The pieces have another number of outputs than `shape`, or one cannot hold its own shape.
        """
        total = sum(outputs for _, outputs in self.pieces)
        if total != shape[-2]:
            raise ValueError(f"pieces of {total} outputs do not make a weight of shape {shape}")
        return {
            f"{number}.{name}": replace(spec, outputs=None)
            for number, (format, outputs) in enumerate(self.pieces)
            for name, spec in format.parts((*shape[:-2], outputs, shape[-1])).items()
        }

    def dense(self, parts: Mapping[str, Tensor], shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Return the dense weights of all pieces as one."""
        return torch.cat([piece.dense(dtype) for piece in self.unstack(parts, shape)], dim=-2)

    def unstack(self, parts: Mapping[str, Tensor], shape: tuple[int, ...]) -> list[Stored]:
        """Return the pieces as weights; they share the memory of `parts`."""
        found = []
        for number, (format, outputs) in enumerate(self.pieces):
            whole = (*shape[:-2], outputs, shape[-1])
            found.append(Stored(format, whole, {name: parts[f"{number}.{name}"] for name in format.parts(whole)}))
        return found


@dataclass(frozen=True, slots=True, eq=False)
class Stored:
    """A weight as it lies in memory."""

    format: Format
    shape: tuple[int, ...]
    """Shape of the weight, [..., out, in]."""
    parts: Mapping[str, Tensor]
    """The format's tensors, by name."""

    def __post_init__(self) -> None:
        """Raise `ValueError` unless the parts have the shapes and dtypes that the format says."""
        specs = self.format.parts(self.shape)
        if self.parts.keys() != specs.keys():
            raise ValueError(f"{self.format.name} has the parts {', '.join(specs)}; got {', '.join(self.parts)}")
        for name, spec in specs.items():
            part = self.parts[name]
            if part.shape != spec.shape or part.dtype != spec.dtype:
                raise ValueError(
                    f"{name} of a weight {list(self.shape)} in {self.format.name} is {spec.dtype} {list(spec.shape)}; "
                    f"got {part.dtype} {list(part.shape)}"
                )

    @staticmethod
    def from_dense(values: Tensor) -> Stored:
        """Return a weight whose elements are `values`, without a copy."""
        return Stored(Dense(values.dtype), tuple(values.shape), {_VALUES: values})

    @staticmethod
    def allocate(
        format: Format, shape: tuple[int, ...], empty: Callable[[Sequence[int], torch.dtype], Tensor]
    ) -> Stored:
        """Return a weight whose parts `empty` makes from their shapes and dtypes, in the order of `Format.parts`."""
        return Stored(
            format, shape, {name: empty(spec.shape, spec.dtype) for name, spec in format.parts(shape).items()}
        )

    @staticmethod
    def stack(pieces: Sequence[Stored]) -> Stored:
        """Return weights that read the same inputs as one of format `Stacked`, which shares their memory."""
        first = pieces[0].shape
        format = Stacked(tuple((piece.format, piece.shape[-2]) for piece in pieces))
        parts = {f"{number}.{name}": part for number, piece in enumerate(pieces) for name, part in piece.parts.items()}
        return Stored(format, (*first[:-2], sum(piece.shape[-2] for piece in pieces), first[-1]), parts)

    @property
    def nbytes(self) -> int:
        """Size of all parts in bytes."""
        return sum(part.nbytes for part in self.parts.values())

    def dense(self, dtype: torch.dtype) -> Tensor:
        """Return the weight [..., out, in] in `dtype`; it may share memory with the parts."""
        return self.format.dense(self.parts, self.shape, dtype)

    def to(self, device: torch.device) -> Stored:
        """Return the same weight on `device`; parts that are there already are not copied."""
        return Stored(self.format, self.shape, {name: part.to(device) for name, part in self.parts.items()})

    def pieces(self) -> list[Stored]:
        """Return the weights that a `Stacked` one is made of, which share its memory, or this one alone."""
        return self.format.unstack(self.parts, self.shape) if isinstance(self.format, Stacked) else [self]

    def split(self, outputs: Sequence[int]) -> list[Stored]:
        """Return the weights of the next `outputs` outputs each, which share this one's memory.

        Raises:
            ValueError: The format does not join such weights (see `joins`), or they have not all outputs together.
        """
        if not joins(self.format, self.shape, outputs):
            raise ValueError(f"a weight {list(self.shape)} in {self.format.name} cannot be split into {list(outputs)}")
        specs, axis = self.format.parts(self.shape), len(self.shape) - 2
        starts = [end - count for end, count in zip(accumulate(outputs), outputs, strict=True)]
        pieces = []
        for start, count in zip(starts, outputs, strict=True):
            parts = {}
            for name, spec in specs.items():
                size = spec.outputs or 1
                parts[name] = self.parts[name].narrow(axis, start // size, -(-count // size))
            pieces.append(Stored(self.format, (*self.shape[:-2], count, self.shape[-1]), parts))
        return pieces

    def rows(self, ids_K: Tensor, dtype: torch.dtype) -> Tensor:
        """Return the rows `ids_K` (int64) of a matrix as a new tensor [K, in] in `dtype`."""
        if isinstance(self.format, Stacked):
            return self.dense(dtype).index_select(0, ids_K)
        specs = self.format.parts(self.shape)
        block = math.lcm(*(spec.outputs or 1 for spec in specs.values()))
        parts = dict(self.parts)
        for name, spec in specs.items():
            if spec.outputs is None:
                continue
            index_X = ids_K
            if block > 1:  # the slices of the whole blocks in which the rows lie
                slices = block // spec.outputs
                index_KB = (ids_K // block * slices).unsqueeze(1) + torch.arange(slices, device=ids_K.device)
                index_X = index_KB.clamp_(max=spec.shape[0] - 1).view(-1)
            parts[name] = self.parts[name].index_select(0, index_X)
        rows_XI = self.format.dense(parts, (len(ids_K) * block, self.shape[-1]), dtype)
        return rows_XI if block == 1 else rows_XI[torch.arange(len(ids_K), device=ids_K.device) * block + ids_K % block]


def joins(format: Format, shape: tuple[int, ...], outputs: Sequence[int]) -> bool:
    """Return whether weights of `outputs` outputs each, one above the other, are one weight of `shape` in `format`.

    They are where every part is cut between two of its slices. A part of the whole weight cannot be cut.
    """
    ends = list(accumulate(outputs))
    if not ends or ends[-1] != shape[-2]:
        return False
    return all(
        spec.outputs is not None and all(end % spec.outputs == 0 for end in ends[:-1])
        for spec in format.parts(shape).values()
    )


def row_blocks(rows: int, columns: int, multiple: int = 64) -> list[slice]:
    """Return slices of a matrix's rows that are small enough to stay in a core's cache while they are worked on.

    Each but the last holds a multiple of `multiple` rows.
    """
    step = -(-_BLOCK_ELEMENTS // (columns * multiple)) * multiple
    return [slice(first, first + step) for first in range(0, rows, step)]
