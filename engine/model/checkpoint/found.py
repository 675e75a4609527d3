"""`Found`, how a checkpoint holds a weight, and `Reader`, what finds it; never knows a layout of its own."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NoReturn, Protocol, TypeAlias

from torch import Tensor

from headrace.engine.errors import ModelRejected
from headrace.engine.model.checkpoint.gguf import GgufFile
from headrace.engine.model.checkpoint.safetensors import SafetensorsFolder
from headrace.ops.formats import Format, Stored

__all__ = ["Allocate", "Checkpoint", "Found", "Pieces", "Place", "Reader", "Staging", "refuse_tensor"]

Checkpoint: TypeAlias = SafetensorsFolder | GgufFile
"""The open files of a model. `shapes` has all tensors by name."""
Allocate: TypeAlias = Callable[[int], Tensor]
"""Function that returns uint8 host memory of a given number of bytes, valid until the next piece is asked for."""


class Staging(Protocol):
    """Protocol of the way from a file to the device of the weights."""

    def __call__(self, count: int, /) -> Tensor:
        """Return `count` bytes of uint8 host memory, valid until the next piece is asked for."""
        ...

    def send(self, block: Tensor, /) -> Tensor:
        """Return what has been read on the device of the weights, where it may be rearranged."""
        ...


Pieces: TypeAlias = Iterator[tuple[int, Stored]]
"""A weight in pieces in host memory or where `Staging.send` puts them, in order, each with its first output."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where in a tensor that several weights share one of them lies."""

    expert: int
    """Number of the expert whose weight it is."""
    experts: int
    """Number of experts that the tensor holds; 0 for one that holds norms of heads."""
    nbytes: int
    """Bytes of the weight alone."""


@dataclass(frozen=True, slots=True)
class Found:
    """A weight as a checkpoint holds it; nothing of it is read yet."""

    format: Format
    shape: tuple[int, ...]
    tensors: tuple[str, ...]
    """Names of the checkpoint's tensors from which the weight is read."""
    pieces: Callable[[int, Staging], Pieces]
    """Function that reads the weight, given about how many elements a piece has, and the way to the device."""
    check: Callable[[], None] | None = None
    """Function that reads what decides whether the weight is sound, such as its scales, and raises `ModelRejected`
    unless it is; None where nothing does."""
    kind: str | None = None
    """What the tensors of one product have to have in common, such as their bits and groups; None if nothing."""
    place: Place | None = None
    """Where in its one tensor the weight lies; None if it has its tensors for itself."""

    def nbytes(self, files: Checkpoint) -> int:
        """Return the bytes of the files that hold the weight."""
        return sum(map(files.nbytes, self.tensors)) if self.place is None else self.place.nbytes


class Reader(Protocol):
    """Protocol of what knows one way in which checkpoints store weights."""

    def find(self, files: Checkpoint, name: str) -> Found | None:
        """Return how `files` hold the weight of a name such as `model.layers.0.mlp.up_proj.weight`.

        None if they do not hold it in this reader's way. Shapes in `files` are those of a possibly hostile header.

        Raises:
            ModelRejected: They hold it in this way, but it is damaged.
        """
        ...


def refuse_tensor(files: Checkpoint, tensor: str, value: object, limit: object) -> NoReturn:
    """Raise `ModelRejected` that says: the tensor is `value`, but `limit` is wanted."""
    message = f"{files.name}: the tensor {tensor[:200]} is {value}; wanted: {limit}"
    raise ModelRejected(message, field=tensor, value=value, limit=limit)
