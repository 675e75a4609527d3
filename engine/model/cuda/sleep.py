"""`Weights`: releases a model's parameters on a GPU together with the pages, and restores both; never runs the model.

Next to read: ops/cuda/memory/weights.py.
"""

from __future__ import annotations

from collections.abc import Callable

from headrace.engine.model.shared.memory import free_host_bytes
from headrace.ops.cuda.memory.pools import PoolMemory
from headrace.ops.cuda.memory.weights import WeightMemory

__all__ = ["Weights"]


class Weights:
    """The parameters of one model, in memory that it owns."""

    def __init__(self, memory: WeightMemory, load: Callable[[], object]) -> None:
        """Take over `memory`; `load` reads the parameters into it."""
        self._memory = memory
        self._load = load

    def sleep(self, pages: PoolMemory, *, keep: bool) -> None:
        """Release the memory of pages and parameters; the device must be idle.

        Raises:
            MemoryError: The host has no room for the parameters.
        """
        memory = self._memory
        if keep and memory.used > (free := free_host_bytes()) and not memory.has_copy:
            raise MemoryError(f"{memory.used} bytes of weights, of which {free} are free")
        pages.resize(0)
        memory.release(keep=keep)

    def wake(self, pages: PoolMemory, num_pages: int) -> None:
        """Restore the parameters and room for `num_pages` pages, or neither.

        Raises:
            ModelRejected: The model's files cannot be used any more.
            torch.OutOfMemoryError: The device has too little memory.
        """
        memory = self._memory
        kept = memory.has_copy
        try:
            if not memory.restore():
                memory.rewind()
                self._load()
            pages.resize(num_pages)
        except BaseException:
            pages.resize(0)
            memory.release(keep=kept)
            raise
        memory.drop_copy()

    def close(self) -> None:
        """Release all memory."""
        self._memory.close()
