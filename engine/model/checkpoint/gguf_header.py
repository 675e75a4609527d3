"""Parses the header of a GGUF file, which may be hostile: metadata, and where each tensor lies; reads no tensor.

The whole header is checked here, once, so no count, length or offset in the file decides an allocation or a seek on its
own. Next to read: gguf.py.
"""

from __future__ import annotations

import contextlib
import math
import mmap
import struct
from dataclasses import dataclass
from typing import Any, NoReturn

import gguf
from gguf import GGMLQuantizationType as Kind

from headrace.engine.errors import ModelRejected
from headrace.ops.gguf_formats import BLOCK_KINDS

__all__ = ["KINDS", "GgufTensor", "read_gguf_header"]

KINDS = (Kind.F32, Kind.F16, Kind.BF16, *BLOCK_KINDS, Kind.MXFP4)
"""Kinds of tensors that are read."""
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_BOOL, _STRING, _ARRAY = 7, 8, 9
_LENGTH = struct.Struct("<Q")
_MAX_TENSORS = 1 << 16
_MAX_KEYS = 1 << 16
_MAX_NAME_BYTES = 1 << 10
_MAX_STRING_BYTES = 16 << 20
_MAX_METADATA_BYTES = 256 << 20
_MAX_VALUES = 1 << 21
"""Most array elements in all metadata together: the largest vocabularies with their merges need about a million."""
_MAX_DIMS = 4
_MAX_ALIGNMENT = 1 << 16


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """Place of a tensor in its file, and its encoding."""

    kind: Kind
    shape: tuple[int, ...]
    """Shape with the outer size first, as torch has it; the file stores the inner size first."""
    offset: int
    """Position of the data, in bytes from the start of the file."""
    nbytes: int


class _Header:
    """A cursor over the header that refuses to read past the end or beyond a limit."""

    def __init__(self, data: mmap.mmap, name: str) -> None:
        self.data = data
        self.name = name
        self.at = 0
        self.values_left = _MAX_VALUES

    def refuse(self, field: str, value: object, limit: object) -> NoReturn:
        shown = f"{value!r}"[:200]
        raise ModelRejected(f"{self.name}: {field} is {shown}; allowed: {limit}", field=field, value=value, limit=limit)

    def skip(self, count: int, field: str) -> int:
        """Move past `count` bytes and return where they start."""
        start, size = self.at, len(self.data)
        if count > size - start:
            self.refuse(f"the end of {field}", start + count, f"the file's {size} bytes (truncated?)")
        if count > _MAX_METADATA_BYTES - start:
            self.refuse(f"the end of {field}", start + count, f"{_MAX_METADATA_BYTES} bytes of header")
        self.at = start + count
        return start

    def scalar(self, code: str, field: str) -> Any:
        start = self.skip(struct.calcsize("<" + code), field)
        if code == "?" and self.data[start] > 1:
            self.refuse(field, self.data[start], "0 or 1")
        return struct.unpack_from("<" + code, self.data, start)[0]

    def count(self, code: str, field: str, limit: int) -> int:
        value: int = self.scalar(code, field)
        if value > limit:
            self.refuse(field, value, f"at most {limit}")
        return value

    def text(self, field: str, limit: int) -> str:
        length = self.count("Q", f"the length of {field}", limit)
        start = self.skip(length, field)
        try:
            return str(self.data[start : start + length], "utf-8")
        except UnicodeDecodeError as error:
            self.refuse(field, self.data[start : start + min(length, 50)], f"UTF-8 ({error.reason})")

    def value(self, kind: int, field: str) -> object:
        if kind == _STRING:
            return self.text(field, _MAX_STRING_BYTES)
        if kind in _SCALARS:
            return self.scalar(_SCALARS[kind], field)
        if kind != _ARRAY:
            self.refuse(f"the type of {field}", kind, "0 to 12")
        return self._array(field)

    def _array(self, field: str) -> list[Any]:
        kind: int = self.scalar("I", f"the element type of {field}")
        if kind != _STRING and kind not in _SCALARS:
            self.refuse(f"the element type of {field}", kind, "a number, a bool or a string (no nested arrays)")
        count = self.count("Q", f"the length of {field}", self.values_left)
        self.values_left -= count
        if kind == _STRING:
            return self._texts(count, field)
        form = f"<{count}{_SCALARS[kind]}"
        start = self.skip(struct.calcsize(form), field)
        return list(struct.unpack_from(form, self.data, start))

    def _texts(self, count: int, field: str) -> list[str]:
        """Read strings as `text` does, and leave it to `text` to refuse the first that is invalid."""
        data, at = self.data, self.at
        end = min(len(data), _MAX_METADATA_BYTES)
        found: list[str] = []
        length_at, add = _LENGTH.unpack_from, found.append  # a vocabulary has a hundred thousand and more
        with contextlib.suppress(struct.error, UnicodeDecodeError):
            for _ in range(count):
                start = at + 8
                stop = start + length_at(data, at)[0]
                if stop > end or stop - start > _MAX_STRING_BYTES:
                    break
                add(data[start:stop].decode())
                at = stop
        self.at = at
        return found + [self.text(field, _MAX_STRING_BYTES) for _ in range(count - len(found))]


def _metadata(header: _Header, count: int) -> dict[str, object]:
    found: dict[str, object] = {}
    for index in range(count):
        key = header.text(f"metadata key {index}", _MAX_NAME_BYTES)
        if key in found:
            header.refuse("metadata key", key, "each key once")
        found[key] = header.value(header.scalar("I", f"the type of {key}"), key)
    return found


def _tensor(header: _Header, name: str) -> GgufTensor:
    """Read one tensor's entry; its offset still counts from the start of the data."""
    dims = header.count("I", f"the dimensions of {name}", _MAX_DIMS)
    sizes = [header.count("Q", f"a size of {name}", len(header.data) * 8) for _ in range(dims)]
    if not sizes or min(sizes) < 1:
        header.refuse(f"the shape of {name}", sizes, f"1 to {_MAX_DIMS} sizes of at least 1")
    number: int = header.scalar("I", f"the type of {name}")
    kind = next((known for known in Kind if known == number), None)
    if kind not in KINDS:
        shown = kind.name if kind is not None else number
        header.refuse(f"the type of {name}", shown, ", ".join(known.name for known in KINDS))
    block, block_bytes = gguf.GGML_QUANT_SIZES[kind]
    if sizes[0] % block:
        header.refuse(f"the inner size of {name}", sizes[0], f"a multiple of {block} for {kind.name}")
    nbytes = math.prod(sizes) // block * block_bytes
    return GgufTensor(kind, tuple(reversed(sizes)), header.scalar("Q", f"the offset of {name}"), nbytes)


def _tensors(header: _Header, count: int) -> dict[str, GgufTensor]:
    found: dict[str, GgufTensor] = {}
    for index in range(count):
        name = header.text(f"the name of tensor {index}", _MAX_NAME_BYTES)
        if name in found:
            header.refuse("tensor", name, "each name once")
        found[name] = _tensor(header, name)
    return found


def _placed(header: _Header, tensors: dict[str, GgufTensor], alignment: int) -> dict[str, GgufTensor]:
    """Return the tensors with offsets from the start of the file, once each lies in the file and in no other."""
    base = -(-header.at // alignment) * alignment
    placed: dict[str, GgufTensor] = {}
    end = base
    for name, tensor in sorted(tensors.items(), key=lambda item: item[1].offset):
        start = base + tensor.offset
        if tensor.offset % alignment or start < end:
            header.refuse(f"the offset of {name}", tensor.offset, f"a multiple of {alignment} past the tensor before")
        end = start + tensor.nbytes
        if end > len(header.data):
            header.refuse(f"the end of {name}", end, f"the file's size, {len(header.data)} (truncated?)")
        placed[name] = GgufTensor(tensor.kind, tensor.shape, start, tensor.nbytes)
    return placed


def read_gguf_header(data: mmap.mmap, name: str) -> tuple[dict[str, object], dict[str, GgufTensor]]:
    """Return a file's metadata and its tensors, each by its name.

    Args:
        data: The file.
        name: The file's base name, for messages.

    Raises:
        ModelRejected: The file is truncated or hostile, or holds a kind of tensor that is not read.
    """
    header = _Header(data, name)
    magic = header.scalar("I", "the magic number")
    if magic != gguf.GGUF_MAGIC:
        header.refuse("the magic number", magic.to_bytes(4, "little"), "b'GGUF', with which every GGUF file begins")
    version = header.scalar("I", "the version")
    if version not in (2, 3):
        header.refuse("the version", version, "2 or 3, little-endian")
    tensor_count = header.count("Q", "the number of tensors", _MAX_TENSORS)
    metadata = _metadata(header, header.count("Q", "the number of metadata keys", _MAX_KEYS))
    alignment = metadata.get("general.alignment", gguf.GGUF_DEFAULT_ALIGNMENT)
    if not isinstance(alignment, int) or not 1 <= alignment <= _MAX_ALIGNMENT or alignment & (alignment - 1):
        header.refuse("general.alignment", alignment, f"a power of two up to {_MAX_ALIGNMENT}")
    return metadata, _placed(header, _tensors(header, tensor_count), alignment)
