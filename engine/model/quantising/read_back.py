"""`WrittenModules`: reads modules that an earlier run has written, as any engine would; never writes."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from headrace.engine.model.checkpoint.readers import READERS, find
from headrace.engine.model.checkpoint.safetensors import SafetensorsFolder
from headrace.engine.model.quantising.selected import Module
from headrace.ops.formats import Stored

__all__ = ["HostMemory", "WrittenModules"]


class HostMemory:
    """The way from a file to host memory, where all of it stays."""

    def __call__(self, count: int, /) -> Tensor:
        """Return `count` bytes of new memory."""
        return torch.empty(count, dtype=torch.uint8)

    def send(self, block: Tensor, /) -> Tensor:
        """Return the block itself."""
        return block


class WrittenModules:
    """The modules in a folder that is not whole yet, but has its config and its files at their full size."""

    def __init__(self, folder: Path) -> None:
        """Open the folder's files.

        Raises:
            ModelRejected: A header or the index is damaged.
        """
        self._files = SafetensorsFolder(folder)

    def close(self) -> None:
        """Release the files; idempotent."""
        self._files.close()

    def read(self, module: Module) -> Stored:
        """Return a module that has been written, in the format that it has there.

        Raises:
            ModelRejected: The folder does not hold it.
        """
        found = find(self._files, module.weight, READERS)
        assert found is not None and found.format == module.format, f"{module.name} is written as {module.format.name}"
        ((_, weight),) = found.pieces(module.shape[0] * module.shape[1], HostMemory())
        return weight
