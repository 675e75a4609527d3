"""Readers: find out how a checkpoint stores a weight, and read it in that format; never decide what a model needs.

A loader asks its readers in order, and the first that knows a weight reads it. So a stored format that headrace does
not know comes as one reader in front of `READERS`, with nothing else changed.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import partial

import torch

from headrace.engine.model.checkpoint.found import Allocate, Checkpoint, Found, Pieces, Reader, refuse_tensor
from headrace.engine.model.checkpoint.gguf import GgufFile
from headrace.engine.model.checkpoint.head_norms import HeadNormRows
from headrace.engine.model.checkpoint.interleaved import InterleavedExperts
from headrace.engine.model.checkpoint.quantised.reader import QuantisedTensors
from headrace.engine.model.checkpoint.safetensors import SafetensorsFolder
from headrace.engine.model.checkpoint.stacked import StackedExperts
from headrace.ops.formats import Dense, Format, Stored

__all__ = [
    "READERS",
    "Allocate",
    "Checkpoint",
    "Found",
    "GgufBlockMatrices",
    "Pieces",
    "PlainTensors",
    "Reader",
    "find",
    "in_parts",
    "refuse_tensor",
]


class GgufBlockMatrices:
    """Reads the matrices of GGUF files that lie there in blocks."""

    def find(self, files: Checkpoint, name: str) -> Found | None:
        """Return the matrix of a GGUF file if it lies there in blocks."""
        if not isinstance(files, GgufFile) or name not in files.tensors:
            return None
        format = files.block_format(name)
        if format is None:
            return None

        def pieces(elements: int, _allocate: Allocate) -> Pieces:
            return files.stored_blocks(name, elements)

        return Found(format, files.shapes[name], (name,), pieces)


class PlainTensors:
    """Reads a weight from the tensor of its own name: numbers as they are; vectors of a GGUF file's blocks unpack."""

    def find(self, files: Checkpoint, name: str) -> Found | None:
        """Return the tensor if there is one of this name.

        Raises:
            ModelRejected: The tensor has a dtype that a weight cannot have.
        """
        shape = files.shapes.get(name)
        if shape is None:
            return None
        if isinstance(files, SafetensorsFolder):
            return in_parts(files, Dense(files.weight_dtype(name)), shape, {"values": name})

        def pieces(elements: int, _allocate: Allocate) -> Pieces:
            for first, block in files.blocks(name, elements):
                yield first, Stored.from_dense(block)

        return Found(Dense(torch.float32), shape, (name,), pieces)


READERS: tuple[Reader, ...] = (
    GgufBlockMatrices(),
    StackedExperts(),
    InterleavedExperts(),
    HeadNormRows(),
    QuantisedTensors(),
    PlainTensors(),
)
"""The readers of a loader that is given no others."""


def find(files: Checkpoint, name: str, readers: Sequence[Reader]) -> Found | None:
    """Return how `files` hold the weight `name`, by the first of `readers` that knows it; None if none does.

    Raises:
        ModelRejected: A reader knows the weight, but it is damaged.
    """
    return next((found for reader in readers if (found := reader.find(files, name)) is not None), None)


def in_parts(files: SafetensorsFolder, format: Format, shape: tuple[int, ...], tensors: Mapping[str, str]) -> Found:
    """Return how `files` hold a matrix or vector each of whose parts is a tensor of its own.

    Args:
        files: The open checkpoint.
        format: The format of the weight.
        shape: Shape of the weight, [out, in] or [out].
        tensors: Name of the tensor that is each part of the format.

    Raises:
        ModelRejected: A part is missing, or has another shape or dtype than the format says.
    """
    try:
        specs = format.parts(shape)
    except ValueError as error:
        refuse_tensor(files, next(iter(tensors.values())), f"stored as {format.name}", error)
    for part, spec in specs.items():
        wanted, name = f"{spec.dtype} {list(spec.shape)}", tensors[part]
        if name not in files.shapes:
            refuse_tensor(files, name, "missing", wanted)
        found = f"{files.dtype(name)} {list(files.shapes[name])}"
        if found != wanted:
            refuse_tensor(files, name, found, wanted)
    return Found(format, shape, tuple(tensors[part] for part in specs), partial(_pieces, files, format, shape, tensors))


def _pieces(
    files: SafetensorsFolder,
    format: Format,
    shape: tuple[int, ...],
    tensors: Mapping[str, str],
    elements: int,
    allocate: Allocate,
) -> Pieces:
    specs = format.parts(shape)
    # Whole slices of every part.
    grain = math.lcm(*(spec.outputs or 1 for spec in specs.values()))
    outputs = max(elements // math.prod(shape[1:]) // grain, 1) * grain
    largest = max(specs, key=lambda part: specs[part].nbytes)
    whole, rows = {}, {}
    for part, spec in specs.items():
        if spec.outputs is None:
            ((_, block),) = files.raw_blocks(tensors[part], math.prod(spec.shape))
            whole[part] = block.view(spec.shape)
        else:
            count = outputs // spec.outputs * math.prod(spec.shape[1:])
            rows[part] = files.raw_blocks(tensors[part], count, *([allocate] if part == largest else []))
    for first, blocks in zip(range(0, shape[0], outputs), zip(*rows.values(), strict=True), strict=True):
        parts = {part: block for part, (_, block) in zip(rows, blocks, strict=True)}
        yield first, Stored(format, (min(outputs, shape[0] - first), *shape[1:]), parts | whole)
