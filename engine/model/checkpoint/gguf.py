"""Reads GGUF files: opens all files of a model, hands out metadata and tensors; never builds a model.

The header is checked as a whole before any tensor is read (gguf_header.py). Tensors are read with plain reads, not a
mapping: a file that shrinks meanwhile is an error instead of a bus fault, and closing is final.
"""

from __future__ import annotations

import math
import mmap
import os
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from functools import cached_property
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, NoReturn, Self

import gguf
import torch
from gguf import GGMLQuantizationType as Kind

from headrace.adapters.gguf_parts import parts_of
from headrace.adapters.untrusted import open_file
from headrace.engine.errors import ModelRejected
from headrace.engine.model.checkpoint.gguf_header import GgufTensor, read_gguf_header
from headrace.engine.model.families.gguf_rope import ROPE_TENSORS
from headrace.engine.model.families.registry import from_gguf
from headrace.engine.model.spec import DecoderSpec
from headrace.ops.formats import Dense, Format, Stored
from headrace.ops.gguf_float4 import MXFP4, float4_from_file
from headrace.ops.gguf_formats import BLOCK_KINDS, GgufBlocks

__all__ = ["GgufFile"]

_BLOCK_ELEMENTS = 1 << 18
_MOST_DIVISORS = 1024
_NAN = 255  # among the exponents of MXFP4's scales
_NUMBER, _COUNT, _TENSORS = "split.no", "split.count", "split.tensors.count"


class GgufFile:
    """An open GGUF model whose header has been checked: `metadata` as plain Python values, tensors on demand.

    A model is one file, or several (`split.count`) that are named NAME-00001-of-00003.gguf and so on. Close them, or
    leave the `with` block, when the weights are loaded; the metadata stays readable. Several threads may read tensors
    at a time.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        """Open `path` and check its header; of a model that is split, open all parts, of which `path` is the first.

        Raises:
            ModelRejected: A file is missing, truncated or hostile, holds a tensor type that is not supported, or is not
                the part that its name says.
        """
        self.path = Path(path)
        self.name = self.path.name
        self.tensors: dict[str, GgufTensor] = {}
        """Place of each tensor in its file, by its name."""
        self._open = ExitStack()
        self._where: dict[str, tuple[BinaryIO, str]] = {}
        try:
            self.metadata = self._add(self.path)
            if self.metadata.get(_COUNT) not in (None, 0, 1):
                self._add_parts()
        except BaseException:
            self.close()
            raise

    def _add(self, path: Path) -> dict[str, object]:
        """Open one file, take over its tensors, and return its metadata."""
        try:
            file = self._open.enter_context(open_file(path))
        except OSError as error:
            raise ModelRejected(f"{path.name}: cannot be read ({error.strerror})", field=path.name) from error
        if os.fstat(file.fileno()).st_size == 0:
            raise ModelRejected(f"{path.name}: the file is empty", field=path.name)
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            metadata, tensors = read_gguf_header(data, path.name)
        for name, tensor in tensors.items():
            if name in self.tensors:
                _refuse(path.name, "tensor", name, f"once, but {self._where[name][1]} has it, too")
            self.tensors[name] = tensor
            self._where[name] = file, path.name
        return metadata

    def _add_parts(self) -> None:
        """Open the parts of a model beside the first, and refuse them unless they are parts of one model."""
        count, names = self.metadata[_COUNT], parts_of(self.name)
        if len(names) != count:
            _refuse(self.name, _COUNT, count, f"{len(names)}, as the file's name says (NAME-00001-of-00003.gguf)")
        if (self.metadata.get(_NUMBER), self.name) != (0, names[0]):
            _refuse(self.name, _NUMBER, self.metadata.get(_NUMBER), f"0, the model's first part: open {names[0]}")
        for number, name in enumerate(names[1:], 1):
            path = self.path.with_name(name)
            if not path.exists():
                told = f"{self.name}: {name}, part {number + 1} of {count}, is missing; all parts belong in one folder"
                raise ModelRejected(told, field=name, limit="every part present")
            metadata = self._add(path)
            if metadata.get(_NUMBER) != number:
                _refuse(name, _NUMBER, metadata.get(_NUMBER), f"{number}, as the file's name says")
            for key in sorted((metadata.keys() & self.metadata.keys()) - {_NUMBER}):
                if metadata[key] != self.metadata[key]:
                    _refuse(name, key, metadata[key], f"the value that {self.name} has")
        counted = self.metadata.get(_TENSORS, len(self.tensors))
        if counted != len(self.tensors):
            _refuse(self.name, _TENSORS, counted, f"{len(self.tensors)}, the tensors of all parts")

    def __enter__(self) -> Self:
        """Return the open model itself."""
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        """Close all files."""
        self.close()

    def close(self) -> None:
        """Release the files; idempotent."""
        self._open.close()

    def spec(self) -> DecoderSpec:
        """Return the spec that the metadata and the tensors' names and shapes describe.

        Raises:
            ModelRejected: The model is of a kind that headrace does not know, or contradicts itself.
        """
        divisors = {name: self._divisors(name) for name in ROPE_TENSORS if name in self.tensors}
        return from_gguf(self.metadata, self.shapes, divisors, self.name)

    def _divisors(self, name: str) -> tuple[float, ...]:
        """Return the numbers of a tensor that has a divisor for each frequency."""
        shape = self.shapes[name]
        if math.prod(shape) > _MOST_DIVISORS:
            _refuse(self.name, name, list(shape), f"a shape of at most {_MOST_DIVISORS} numbers")
        return tuple(value for _, rows in self.blocks(name) for value in rows.flatten().tolist())

    @cached_property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Every tensor's shape by its name, outer size first."""
        return {name: tensor.shape for name, tensor in self.tensors.items()}

    def nbytes(self, name: str) -> int:
        """Return how many bytes of the file the tensor takes."""
        return self.tensors[name].nbytes

    def block_format(self, name: str) -> Format | None:
        """Return the format of a matrix that lies in the file in blocks; None for other tensors."""
        tensor = self.tensors[name]
        return _blocks_of(tensor.kind) if len(tensor.shape) == 2 else None

    def blocks(self, name: str, elements: int = _BLOCK_ELEMENTS) -> Iterator[tuple[int, torch.Tensor]]:
        """Yield a tensor's rows in order, dequantised, as (first row, float32 [rows, inner] or [elements]).

        Args:
            name: A key of `tensors`.
            elements: About how many elements a block has; a vector is one block.

        Raises:
            ModelRejected: The file has shrunk since it was opened.
        """
        tensor = self.tensors[name]
        for first, raw in self._raw_blocks(name, tensor, elements):
            values = _dequantised(raw, tensor.kind)
            yield first, values.reshape(-1) if len(tensor.shape) == 1 else values

    def stored_blocks(self, name: str, elements: int = _BLOCK_ELEMENTS) -> Iterator[tuple[int, Stored]]:
        """Yield the rows of a matrix of blocks in order, as the file has them, each with its first row.

        Raises:
            ModelRejected: The file has shrunk since it was opened.
        """
        tensor = self.tensors[name]
        for first, raw in self._raw_blocks(name, tensor, elements):
            yield first, self._stored(name, raw)

    def stacked_format(self, name: str) -> Format:
        """Return the format in which `in_stack` yields the rows of a stack of matrices."""
        return _blocks_of(self.tensors[name].kind) or Dense(torch.float32)

    def in_stack(self, name: str, wanted: range, elements: int = _BLOCK_ELEMENTS) -> Iterator[tuple[int, Stored]]:
        """Yield rows of a stack of matrices in order, in blocks as the file has them, or else in float32.

        Args:
            name: A key of `tensors`.
            wanted: The rows, counted through all matrices; each is yielded with its place among these.
            elements: About how many elements a block has.

        Raises:
            ModelRejected: The file has shrunk since it was opened.
        """
        tensor = self.tensors[name]
        is_plain = _blocks_of(tensor.kind) is None
        for first, raw in self._raw_blocks(name, tensor, elements, wanted):
            yield first, Stored.from_dense(_dequantised(raw, tensor.kind)) if is_plain else self._stored(name, raw)

    def _stored(self, name: str, raw: torch.Tensor) -> Stored:
        """Return rows of blocks, uint8 [rows, bytes], as a weight."""
        tensor = self.tensors[name]
        if tensor.kind != Kind.MXFP4:
            return GgufBlocks(tensor.kind).from_file(raw, (len(raw), tensor.shape[-1]))
        weight = float4_from_file(raw)
        if bool((weight.parts["scale"] == _NAN).any()):
            _refuse(self.name, f"a scale of {name}", "nan", "a number")
        return weight

    def _raw_blocks(
        self, name: str, tensor: GgufTensor, elements: int, wanted: range | None = None
    ) -> Iterator[tuple[int, torch.Tensor]]:
        """Yield (first row, uint8 [rows, bytes of a row]) of all rows, or of those that are wanted, counted from 0."""
        columns = tensor.shape[-1]
        row_bytes = tensor.nbytes // math.prod(tensor.shape[:-1])
        rows, offset = math.prod(tensor.shape[:-1]), tensor.offset
        if wanted is not None:
            rows, offset = len(wanted), tensor.offset + wanted.start * row_bytes
        step = max(elements // columns, 1)
        file, file_name = self._where[name]
        for first in range(0, rows, step):
            data = bytearray(min(step, rows - first) * row_bytes)
            view = memoryview(data)
            start, done = offset + first * row_bytes, 0
            while done < len(view):
                got = os.preadv(file.fileno(), [view[done:]], start + done)
                if not got:
                    raise ModelRejected(f"{file_name}: the file ends inside {name}", field=name)
                done += got
            yield first, torch.frombuffer(data, dtype=torch.uint8).view(-1, row_bytes)


def _blocks_of(kind: Kind) -> Format | None:
    """Return the format of blocks of a kind; None for a kind that is no block's."""
    return MXFP4 if kind == Kind.MXFP4 else GgufBlocks(kind) if kind in BLOCK_KINDS else None


def _refuse(file: str, field: str, value: object, limit: object) -> NoReturn:
    shown = f"{value!r}"[:200]
    raise ModelRejected(f"{file}: {field} is {shown}; allowed: {limit}", field=field, value=value, limit=limit)


def _dequantised(raw: torch.Tensor, kind: Kind) -> torch.Tensor:
    """Return float32 [rows, inner] from rows of the file's bytes."""
    if kind == Kind.F32:
        return raw.view(torch.float32)
    if kind == Kind.F16:
        return raw.view(torch.float16).float()
    if kind == Kind.BF16:
        return raw.view(torch.bfloat16).float()
    if kind == Kind.MXFP4:
        return float4_from_file(raw).dense(torch.float32)
    block, size = gguf.GGML_QUANT_SIZES[kind]
    shape = (len(raw), raw.shape[1] // size * block)
    return GgufBlocks(kind).from_file(raw, shape).dense(torch.float32)
