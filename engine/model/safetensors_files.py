"""Reads safetensors checkpoints: checks a possibly hostile header or index, then hands out rows; never runs a pickle.

The header is small, plain JSON, and everything in it is checked here before any tensor is read: its length, each
dtype, shape and byte range, and that the ranges fill the file exactly. Tensors are read with plain reads, no mapping.
"""

from __future__ import annotations

import math
import os
import struct
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, NoReturn, Self

import torch

from headrace.engine.errors import ModelRejected
from headrace.engine.model.untrusted import parse_object, read_object

__all__ = ["SafetensorsFolder", "TensorEntry", "read_header"]

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
_MAX_HEADER_BYTES = 16 << 20
_MAX_INDEX_BYTES = 64 << 20
_MAX_DIMS = 8
_MAX_SHARDS = 4096
_BITS = {
    "BOOL": 8,
    "U8": 8,
    "I8": 8,
    "F8_E5M2": 8,
    "F8_E4M3": 8,
    "I16": 16,
    "U16": 16,
    "F16": 16,
    "BF16": 16,
    "I32": 32,
    "U32": 32,
    "F32": 32,
    "I64": 64,
    "U64": 64,
    "F64": 64,
}
_WEIGHT_DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "F64": torch.float64}


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """Where a tensor lies in its file."""

    dtype: str
    """As the header spells it, such as `BF16`."""
    shape: tuple[int, ...]
    offset: int
    """Bytes from the start of the file."""
    nbytes: int


def _refuse(name: str, field: str, value: object, limit: object) -> NoReturn:
    shown = repr(value)[:200]
    raise ModelRejected(f"{name}: {field} is {shown}; allowed: {limit}", field=field, value=value, limit=limit)


def _natural(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 62


def _entry(name: str, tensor: str, given: object) -> TensorEntry:
    """Check one tensor's entry by itself; its offset still counts from the end of the header."""
    if not isinstance(given, dict) or given.keys() != {"dtype", "shape", "data_offsets"}:
        _refuse(name, tensor, given, "an object with dtype, shape and data_offsets")
    dtype, shape, offsets = given["dtype"], given["shape"], given["data_offsets"]
    if not isinstance(dtype, str) or dtype not in _BITS:
        _refuse(name, f"the dtype of {tensor}", dtype, ", ".join(_BITS))
    if not isinstance(shape, list) or len(shape) > _MAX_DIMS or not all(map(_natural, shape)):
        _refuse(name, f"the shape of {tensor}", shape, f"at most {_MAX_DIMS} sizes")
    if not isinstance(offsets, list) or len(offsets) != 2 or not all(map(_natural, offsets)):
        _refuse(name, f"the data_offsets of {tensor}", offsets, "two offsets")
    nbytes = math.prod(shape) * _BITS[dtype] // 8
    if offsets[1] - offsets[0] != nbytes:
        _refuse(name, f"the data_offsets of {tensor}", offsets, f"{nbytes} bytes apart, as its shape says")
    return TensorEntry(dtype, tuple(shape), offsets[0], nbytes)


def read_header(file: BinaryIO, name: str) -> dict[str, TensorEntry]:
    """Return the tensors of an open safetensors file, whose ranges fill it without overlap or hole.

    Args:
        file: The file, open for reading in binary.
        name: Its base name, for messages.

    Raises:
        ModelRejected: The file is truncated, or its header is damaged or hostile.
    """
    size = os.fstat(file.fileno()).st_size
    file.seek(0)
    start = file.read(8)
    if len(start) < 8:
        _refuse(name, "the file's size", size, "at least 8 bytes")
    (length,) = struct.unpack("<Q", start)
    limit = min(size - 8, _MAX_HEADER_BYTES)
    if length > limit:
        _refuse(name, "the header's length", length, f"at most {limit} bytes")
    header = parse_object(_exactly(file, 8, length, name), f"{name} (header)")
    header.pop("__metadata__", None)
    entries = {tensor: _entry(name, tensor, given) for tensor, given in header.items()}
    base = end = 8 + length
    placed = {}
    for tensor, entry in sorted(entries.items(), key=lambda item: (item[1].offset, item[1].nbytes)):
        if base + entry.offset != end:
            _refuse(name, f"the offset of {tensor}", entry.offset, f"{end - base}, where the tensor before it ends")
        placed[tensor] = TensorEntry(entry.dtype, entry.shape, end, entry.nbytes)
        end += entry.nbytes
    if end != size:
        _refuse(name, "the file's size", size, f"{end} bytes, as its header says (truncated?)")
    return placed


def _exactly(file: BinaryIO, offset: int, count: int, name: str) -> bytes:
    file.seek(offset)
    data = file.read(count)
    if len(data) != count:
        _refuse(name, "the file's size", offset + len(data), f"at least {offset + count} bytes")
    return data


def _allocate(count: int) -> torch.Tensor:
    return torch.empty(count, dtype=torch.uint8)


def _read_into(raw: torch.Tensor, file: BinaryIO, offset: int, name: str) -> None:
    """Fill `raw` from `offset`, with no copy in between."""
    file.seek(offset)
    count = file.readinto(raw.numpy().data)  # type: ignore[attr-defined]
    if count != len(raw):
        _refuse(name, "the file's size", offset + count, f"at least {offset + len(raw)} bytes")


class SafetensorsFolder:
    """The open safetensors files of a Hugging Face folder, with every header checked.

    Close it, or leave its `with` block, when the weights are loaded.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        """Open `model.safetensors`, or the shards that `model.safetensors.index.json` lists.

        Raises:
            ModelRejected: There are none, a shard is missing, or a header or the index is damaged or hostile.
        """
        self.path = Path(folder)
        self.name = self.path.name
        self._open = ExitStack()
        self._where: dict[str, tuple[BinaryIO, str]] = {}
        self._entries: dict[str, TensorEntry] = {}
        try:
            if (self.path / SINGLE_FILE).exists():
                self._add(SINGLE_FILE)
            else:
                self._add_shards()
        except OSError as error:
            self.close()
            raise ModelRejected(f"{self.name}: cannot be read ({error.strerror})", field=self.name) from error
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        """Return the folder itself."""
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        """Close the files."""
        self.close()

    def close(self) -> None:
        """Release the files; idempotent."""
        self._open.close()

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Every tensor's shape by its name."""
        return {tensor: entry.shape for tensor, entry in self._entries.items()}

    def nbytes(self, tensor: str) -> int:
        """Return how many bytes of a file the tensor takes."""
        return self._entries[tensor].nbytes

    def blocks(
        self, tensor: str, elements: int, allocate: Callable[[int], torch.Tensor] = _allocate
    ) -> Iterator[tuple[int, torch.Tensor]]:
        """Yield a tensor's rows in order as (first row, [rows, inner] or [elements]) in the file's own dtype.

        Args:
            tensor: A key of `shapes`.
            elements: About how many elements a block has.
            allocate: Gives uint8 host memory of so many bytes for each block.

        Raises:
            ModelRejected: The dtype is none that a weight can have, or the file has shrunk since it was opened.
        """
        entry = self._entries[tensor]
        file, name = self._where[tensor]
        dtype = _WEIGHT_DTYPES.get(entry.dtype)
        if dtype is None:
            _refuse(name, f"the dtype of {tensor}", entry.dtype, ", ".join(_WEIGHT_DTYPES))
        rows, *inner = entry.shape
        row_bytes = entry.nbytes // rows
        step = max(elements // math.prod(inner), 1)
        for first in range(0, rows, step):
            count = min(step, rows - first)
            raw = allocate(count * row_bytes)
            _read_into(raw, file, entry.offset + first * row_bytes, name)
            yield first, raw.view(dtype).view(count, *inner)

    def _add(self, name: str) -> None:
        path = self.path / name
        if not path.is_file():
            raise ModelRejected(f"{self.name}: the file {name} is missing", field=name, limit="every shard present")
        file = self._open.enter_context(path.open("rb"))
        for tensor, entry in read_header(file, name).items():
            if tensor in self._entries:
                _refuse(name, "tensor", tensor, f"once, but {self._where[tensor][1]} has it, too")
            self._entries[tensor] = entry
            self._where[tensor] = (file, name)

    def _add_shards(self) -> None:
        if not (self.path / INDEX_FILE).exists():
            self._refuse_without_safetensors()
        weight_map = read_object(self.path / INDEX_FILE, _MAX_INDEX_BYTES).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            _refuse(INDEX_FILE, "weight_map", weight_map, "an object from tensor names to files")
        for tensor, shard in weight_map.items():
            plain = isinstance(shard, str) and shard.endswith(".safetensors") and not set(shard) & {"/", "\\", "\0"}
            if not plain:
                _refuse(INDEX_FILE, f"the file of {tensor}", shard, "the plain name of a .safetensors file")
        shards = sorted(set(weight_map.values()))
        if len(shards) > _MAX_SHARDS:
            _refuse(INDEX_FILE, "the number of shards", len(shards), _MAX_SHARDS)
        for shard in shards:
            self._add(shard)
        for tensor in weight_map.keys() | self._entries.keys():
            held = self._where[tensor][1] if tensor in self._where else None
            if weight_map.get(tensor) != held:
                _refuse(INDEX_FILE, f"the file of {tensor}", weight_map.get(tensor), f"where the tensor is: {held}")

    def _refuse_without_safetensors(self) -> NoReturn:
        if not self.path.is_dir():
            raise ModelRejected(f"{self.name}: no such folder", field=self.name)
        pickles = sorted(path.name for suffix in ("bin", "pt", "pth") for path in self.path.glob(f"*.{suffix}"))
        if pickles:
            message = f"{self.name}: {pickles[0]} is a pickle, which can run code; only safetensors are read"
            raise ModelRejected(message, field=pickles[0], limit=SINGLE_FILE)
        message = f"{self.name}: neither {SINGLE_FILE} nor {INDEX_FILE} is there"
        raise ModelRejected(message, field=SINGLE_FILE)
