"""The safetensors files of a checkpoint whose tensors are known before the first is written; knows no quantisation.

`lay_out` gives each tensor its place, so that tensors can be written in any order, and again, with the same result.
"""

from __future__ import annotations

import json
import math
import os
import struct
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import torch
from torch import Tensor

from headrace.engine.model.checkpoint.safetensors import DTYPE_NAMES, SINGLE_FILE
from headrace.engine.model.quantising.compressed import TensorSpec

__all__ = ["Shard", "Shards", "index", "lay_out", "nbytes"]

_ALIGNMENT: Final = 8


@dataclass(frozen=True, slots=True)
class Shard:
    """One safetensors file."""

    name: str
    header: bytes
    """Everything before the first tensor."""
    places: Mapping[str, int]
    """Offset of each tensor from the start of the file."""
    size: int


def lay_out(tensors: Mapping[str, TensorSpec], most: int) -> list[Shard]:
    """Return the files that hold `tensors`, in their order, each file with tensors of at most `most` bytes.

    A tensor that is larger has a file to itself.
    """
    pieces: list[dict[str, TensorSpec]] = [{}]
    filled = 0
    for name, spec in tensors.items():
        size = nbytes(spec)
        if pieces[-1] and filled + size > most:
            pieces.append({})
            filled = 0
        pieces[-1][name] = spec
        filled += size
    if len(pieces) == 1:
        return [_shard(SINGLE_FILE, pieces[0])]
    count = len(pieces)
    return [_shard(f"model-{number:05}-of-{count:05}.safetensors", each) for number, each in enumerate(pieces, 1)]


def index(shards: list[Shard], tensors: Mapping[str, TensorSpec]) -> bytes | None:
    """Return the text of the index of several files; None for one, which needs none."""
    if len(shards) == 1:
        return None
    where = {name: shard.name for shard in shards for name in shard.places}
    total = {"total_size": sum(map(nbytes, tensors.values()))}
    return (json.dumps({"metadata": total, "weight_map": where}, indent=2) + "\n").encode()


def nbytes(spec: TensorSpec) -> int:
    """Return the bytes that a tensor takes in a file."""
    dtype, shape = spec
    return math.prod(shape) * dtype.itemsize


def _shard(file: str, tensors: Mapping[str, TensorSpec]) -> Shard:
    # The widest elements first, so that all of them are aligned.
    ordered = sorted(tensors.items(), key=lambda item: -item[1][0].itemsize)
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offsets, end = {}, 0
    for name, spec in ordered:
        offsets[name], end = end, end + nbytes(spec)
        header[name] = {"dtype": DTYPE_NAMES[spec[0]], "shape": spec[1], "data_offsets": [offsets[name], end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    start = struct.pack("<Q", len(text)) + text
    return Shard(file, start, {name: len(start) + at for name, at in offsets.items()}, len(start) + end)


class Shards:
    """The open files of a checkpoint that is being written. Close it, or leave its `with` block."""

    def __init__(self, folder: Path, shards: list[Shard]) -> None:
        """Open the files, or make them at their full size; their headers are written at once.

        Raises:
            OSError: A file cannot be written.
        """
        self._open = ExitStack()
        self._places: dict[str, tuple[int, int]] = {}
        try:
            for shard in shards:
                file = os.open(folder / shard.name, os.O_RDWR | os.O_CREAT, 0o644)
                self._open.callback(os.close, file)
                os.ftruncate(file, shard.size)
                _write(file, shard.header, 0)
                self._places.update({name: (file, place) for name, place in shard.places.items()})
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Shards:
        """Return the files themselves."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close the files."""
        self.close()

    def close(self) -> None:
        """Release the files; idempotent."""
        self._open.close()

    def write(self, tensors: Mapping[str, Tensor]) -> None:
        """Write whole tensors, and wait until the system has them on its disk.

        Raises:
            OSError: A file cannot be written.
        """
        for name, tensor in tensors.items():
            self.write_blocks(name, iter([tensor.cpu()]), wait=False)
        for file in {self._places[name][0] for name in tensors}:
            os.fdatasync(file)

    def write_blocks(self, name: str, blocks: Iterator[Tensor], *, wait: bool = True) -> None:
        """Write a tensor given as blocks in host memory, in order; `wait` until the system has it on its disk.

        Raises:
            OSError: A file cannot be written.
        """
        file, at = self._places[name]
        for block in blocks:
            data = block.contiguous().view(-1).view(torch.uint8).numpy().data
            _write(file, data, at)
            at += len(data)
        if wait:
            os.fdatasync(file)


def _write(file: int, data: bytes | memoryview, at: int) -> None:
    while len(data):
        count = os.pwrite(file, data, at)
        data, at = data[count:], at + count
