"""`read_header`: lists the tensors of a safetensors file once its header is checked; never reads a tensor.

The header is small, plain JSON, and everything in it is checked here before any tensor is read: its length, each
dtype, shape and byte range, and that the ranges fill the file exactly.
"""

from __future__ import annotations

import math
import os
import struct
from dataclasses import dataclass
from typing import BinaryIO, NoReturn

from headrace.adapters.errors import ModelRejected
from headrace.adapters.untrusted import in_turns, parse_members, plain

__all__ = ["TensorEntry", "header_bytes", "parse_header", "read_header", "refuse_file"]

_MAX_HEADER_BYTES = 16 << 20
_MAX_DIMS = 8
_BITS = {
    "BOOL": 8,
    "U8": 8,
    "I8": 8,
    "F8_E5M2": 8,
    "F8_E4M3": 8,
    "F8_E8M0": 8,
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


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """The dtype, shape and place of a tensor in its file."""

    dtype: str
    """Name of the dtype as the header spells it, such as `BF16`."""
    shape: tuple[int, ...]
    offset: int
    """Bytes from the start of the file."""
    nbytes: int


def refuse_file(name: str, field: str, value: object, limit: object) -> NoReturn:
    """Raise `ModelRejected` that says: in the file `name`, `field` is `value`, but `limit` is allowed."""
    field, shown = plain(field), repr(value)[:200]
    raise ModelRejected(f"{name}: {field} is {shown}; allowed: {limit}", field=field, value=value, limit=limit)


def _natural(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 62


def _entry(name: str, tensor: str, given: object) -> TensorEntry:
    """Check one tensor's entry by itself; its offset still counts from the end of the header."""
    if not isinstance(given, dict) or given.keys() != {"dtype", "shape", "data_offsets"}:
        refuse_file(name, tensor, given, "an object with dtype, shape and data_offsets")
    dtype, shape, offsets = given["dtype"], given["shape"], given["data_offsets"]
    if not isinstance(dtype, str) or dtype not in _BITS:
        refuse_file(name, f"the dtype of {tensor}", dtype, ", ".join(_BITS))
    if not isinstance(shape, list) or len(shape) > _MAX_DIMS or not all(map(_natural, shape)):
        refuse_file(name, f"the shape of {tensor}", shape, f"at most {_MAX_DIMS} sizes")
    if not isinstance(offsets, list) or len(offsets) != 2 or not all(map(_natural, offsets)):
        refuse_file(name, f"the data_offsets of {tensor}", offsets, "two offsets")
    nbytes = math.prod(shape) * _BITS[dtype] // 8
    if offsets[1] - offsets[0] != nbytes:
        refuse_file(name, f"the data_offsets of {tensor}", offsets, f"{nbytes} bytes apart, as its shape says")
    return TensorEntry(dtype, tuple(shape), offsets[0], nbytes)


def read_header(file: BinaryIO, name: str, most: int = _MAX_HEADER_BYTES) -> dict[str, TensorEntry]:
    """Read and check the header of a safetensors file; see `header_bytes` and `parse_header` for limits and errors."""
    return parse_header(header_bytes(file, name, most), os.fstat(file.fileno()).st_size, name)


def header_bytes(file: BinaryIO, name: str, most: int = _MAX_HEADER_BYTES) -> bytes:
    """Return the header of an open safetensors file, without a look at anything but its length.

    Args:
        file: The file, open for reading in binary.
        name: The file's base name, for messages.
        most: Largest header that is accepted, in bytes.

    Raises:
        ModelRejected: The file is truncated, or its header too long.
    """
    size = os.fstat(file.fileno()).st_size
    file.seek(0)
    start = file.read(8)
    if len(start) < 8:
        refuse_file(name, "the file's size", size, "at least 8 bytes")
    (length,) = struct.unpack("<Q", start)
    limit = min(size - 8, most)
    if length > limit:
        cut = " (truncated?)" if length <= most else ""
        refuse_file(name, "the header's length", length, f"at most {limit} bytes{cut}")
    return _exactly(file, 8, length, name)


def parse_header(header: bytes, size: int, name: str) -> dict[str, TensorEntry]:
    """Return the tensors of a file of `size` bytes, in their order; their ranges fill it without overlap or hole.

    Raises:
        ModelRejected: The file is truncated, or its header is damaged or hostile.
    """
    found = parse_members(header, f"{name} (header)")
    found.pop("__metadata__", None)
    entries = {tensor: _entry(name, tensor, given) for tensor, given in in_turns(found.items())}
    base = end = 8 + len(header)
    placed = {}
    for tensor, entry in in_turns(sorted(entries.items(), key=lambda item: (item[1].offset, item[1].nbytes))):
        if base + entry.offset != end:
            refuse_file(name, f"the offset of {tensor}", entry.offset, f"{end - base}, where the tensor before it ends")
        placed[tensor] = TensorEntry(entry.dtype, entry.shape, end, entry.nbytes)
        end += entry.nbytes
    if end != size:
        refuse_file(name, "the file's size", size, f"{end} bytes, as its header says (truncated?)")
    return placed


def _exactly(file: BinaryIO, offset: int, count: int, name: str) -> bytes:
    file.seek(offset)
    data = file.read(count)
    if len(data) != count:
        refuse_file(name, "the file's size", offset + len(data), f"at least {offset + count} bytes")
    return data
