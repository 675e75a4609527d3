"""Reads safetensors checkpoints: checks a possibly hostile header or index, then hands out rows; never runs a pickle.

Everything in a header (adapters/safetensors_header.py) is checked before any tensor is read. Tensors are read with
plain reads, no mapping.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from functools import cached_property
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, Final, NoReturn, Self

import torch

from headrace.adapters.safetensors_header import TensorEntry, read_header, refuse_file
from headrace.adapters.untrusted import open_file, read_object
from headrace.engine.errors import ModelRejected

__all__ = ["DTYPE_NAMES", "INDEX_FILE", "SINGLE_FILE", "SafetensorsFolder", "pickles_in"]

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
_MAX_INDEX_BYTES = 64 << 20
_MAX_SHARDS = 4096
_WEIGHT_DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "F64": torch.float64}
_DTYPES = _WEIGHT_DTYPES | {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E8M0": torch.float8_e8m0fnu,
    "I16": torch.int16,
    "U16": torch.uint16,
    "I32": torch.int32,
    "U32": torch.uint32,
    "I64": torch.int64,
    "U64": torch.uint64,
}
DTYPE_NAMES: Final = {dtype: name for name, dtype in _DTYPES.items()}
"""What a header calls each dtype."""


def _allocate(count: int) -> torch.Tensor:
    return torch.empty(count, dtype=torch.uint8)


def _read_into(raw: torch.Tensor, file: BinaryIO, offset: int, name: str) -> None:
    """Fill `raw` from `offset` of the file, without a copy in between."""
    view, count = raw.numpy().data, 0
    while count < len(view):
        got = os.preadv(file.fileno(), [view[count:]], offset + count)
        if not got:
            break
        count += got
    if count != len(raw):
        refuse_file(name, "the file's size", offset + count, f"at least {offset + len(raw)} bytes")


class SafetensorsFolder:
    """The open safetensors files of a Hugging Face folder, with every header checked.

    Close it, or leave its `with` block, when the weights are loaded. Several threads may read tensors at a time.
    """

    def __init__(self, folder: str | os.PathLike[str], single: str = SINGLE_FILE) -> None:
        """Open the file `single`, or the shards that `model.safetensors.index.json` lists.

        Raises:
            ModelRejected: There are no such files, a shard is missing, or a header or the index is damaged or hostile.
        """
        self.path = Path(folder)
        self.name = self.path.name
        self._open = ExitStack()
        self._where: dict[str, tuple[BinaryIO, str]] = {}
        self._entries: dict[str, TensorEntry] = {}
        try:
            if (self.path / single).exists():
                self._add(single)
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

    @cached_property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Every tensor's shape by its name."""
        return {tensor: entry.shape for tensor, entry in self._entries.items()}

    def nbytes(self, tensor: str) -> int:
        """Return how many bytes of a file the tensor takes."""
        return self._entries[tensor].nbytes

    def dtype(self, tensor: str) -> torch.dtype:
        """Return the dtype that the file holds the tensor in, of codes and scales, too."""
        return _DTYPES[self._entries[tensor].dtype]

    def weight_dtype(self, tensor: str) -> torch.dtype:
        """Return the floating-point dtype that the file holds the tensor in.

        Raises:
            ModelRejected: The dtype is not one that a weight can have.
        """
        dtype = self._entries[tensor].dtype
        if dtype not in _WEIGHT_DTYPES:
            refuse_file(self._where[tensor][1], f"the dtype of {tensor}", dtype, ", ".join(_WEIGHT_DTYPES))
        return _WEIGHT_DTYPES[dtype]

    def blocks(
        self, tensor: str, elements: int, allocate: Callable[[int], torch.Tensor] = _allocate
    ) -> Iterator[tuple[int, torch.Tensor]]:
        """Yield a tensor's rows in order as (first row, [rows, inner] or [elements]) in the file's own dtype.

        Args:
            tensor: A key of `shapes`.
            elements: About how many elements a block has.
            allocate: Returns uint8 host memory of the given number of bytes for each block.

        Raises:
            ModelRejected: The dtype is not one that a weight can have, or the file has shrunk since it was opened.
        """
        self.weight_dtype(tensor)
        yield from self.raw_blocks(tensor, elements, allocate)

    def raw_blocks(
        self, tensor: str, elements: int, allocate: Callable[[int], torch.Tensor] = _allocate
    ) -> Iterator[tuple[int, torch.Tensor]]:
        """Yield a tensor's rows as `blocks` does, whatever its dtype: codes and scales of a stored format, too.

        Raises:
            ModelRejected: The file has shrunk since it was opened.
        """
        entry = self._entries[tensor]
        if not entry.nbytes:
            return
        rows, *inner = entry.shape or (1,)
        step = max(elements // math.prod(inner), 1)
        for first in range(0, rows, step):
            yield first, self.rows(tensor, first, min(first + step, rows), allocate)

    def rows(
        self,
        tensor: str,
        first: int,
        stop: int,
        allocate: Callable[[int], torch.Tensor] = _allocate,
        *,
        in_stack: bool = False,
    ) -> torch.Tensor:
        """Return the rows from `first` up to `stop` as [rows, inner] in the file's own dtype; a number has one row.

        Args:
            tensor: A key of `shapes`.
            first: First row.
            stop: Row behind the last.
            allocate: Returns uint8 host memory of the given number of bytes.
            in_stack: Whether the tensor is a stack of matrices, whose rows are counted through.

        Raises:
            ModelRejected: The file has shrunk since it was opened.
        """
        entry = self._entries[tensor]
        file, name = self._where[tensor]
        rows, *inner = entry.shape or (1,)
        if in_stack:
            rows, inner = rows * inner[0], inner[1:]
        row_bytes = entry.nbytes // max(rows, 1)
        raw = allocate((stop - first) * row_bytes)
        _read_into(raw, file, entry.offset + first * row_bytes, name)
        return raw.view(_DTYPES[entry.dtype]).view(stop - first, *inner)

    def _add(self, name: str) -> None:
        try:
            file = self._open.enter_context(open_file(self.path / name))
        except ModelRejected as error:
            message = f"{self.name}: the file {name} is missing, or no regular one"
            raise ModelRejected(message, field=name, limit="every shard present") from error
        for tensor, entry in read_header(file, name).items():
            if tensor in self._entries:
                refuse_file(name, "tensor", tensor, f"once, but {self._where[tensor][1]} has it, too")
            self._entries[tensor] = entry
            self._where[tensor] = (file, name)

    def _add_shards(self) -> None:
        if not (self.path / INDEX_FILE).exists():
            self._refuse_without_safetensors()
        weight_map = read_object(self.path / INDEX_FILE, _MAX_INDEX_BYTES).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            refuse_file(INDEX_FILE, "weight_map", weight_map, "an object from tensor names to files")
        for tensor, shard in weight_map.items():
            plain = isinstance(shard, str) and shard.endswith(".safetensors") and not set(shard) & {"/", "\\", "\0"}
            if not plain:
                refuse_file(INDEX_FILE, f"the file of {tensor}", shard, "the plain name of a .safetensors file")
        shards = sorted(set(weight_map.values()))
        if len(shards) > _MAX_SHARDS:
            refuse_file(INDEX_FILE, "the number of shards", len(shards), _MAX_SHARDS)
        for shard in shards:
            self._add(shard)
        for tensor in weight_map.keys() | self._entries.keys():
            held = self._where[tensor][1] if tensor in self._where else None
            if weight_map.get(tensor) != held:
                refuse_file(INDEX_FILE, f"the file of {tensor}", weight_map.get(tensor), f"where the tensor is: {held}")

    def _refuse_without_safetensors(self) -> NoReturn:
        if not self.path.is_dir():
            raise ModelRejected(f"{self.name}: no such folder", field=self.name)
        pickles = pickles_in(self.path)
        if pickles:
            told = "is a pickle, which can run code; safetensors are read (save_pretrained of transformers writes them)"
            message = f"{self.name}: {pickles[0]} {told}, and GGUF files"
            raise ModelRejected(message, field=pickles[0], limit=SINGLE_FILE)
        message = f"{self.name}: neither {SINGLE_FILE} nor {INDEX_FILE} is there, nor a .gguf file"
        raise ModelRejected(message, field=SINGLE_FILE)


def pickles_in(folder: Path) -> list[str]:
    """Return the names of files with weights in a folder that are pickles, in order."""
    return sorted(path.name for suffix in ("bin", "pt", "pth") for path in folder.glob(f"*.{suffix}"))
