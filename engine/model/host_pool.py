"""`HostPool`: pages of keys and values in host memory, and their way there and back; never decides which."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from headrace.engine.model.memory import free_host_bytes

__all__ = ["HostPool"]

_CHUNK_BYTES = 64 << 20  # pinned memory is rounded up to a power of two, so that larger pieces could waste half
_TRIAL_PAGES = 8
_TRIALS = 4


class HostPool:
    """Room for a number of pages of one paged cache, whose pages lie along its second dimension."""

    def __init__(self, kv: Tensor, places: int, *, pinned: bool) -> None:
        """Take the memory.

        Args:
            kv: `[layers, pages, ...]`, any dtype.
            places: Pages to have room for.
            pinned: So that copies need not wait for the host; only where a GPU holds `kv`.

        Raises:
            MemoryError: The host has less that is free.
        """
        needed = places * kv[:, 0].nbytes
        if needed > (free := free_host_bytes()):
            raise MemoryError(f"{needed} bytes for pages, of which {free} are free")
        shape = (kv.shape[0], *kv.shape[2:])
        self._per_chunk = max(1, _CHUNK_BYTES // kv[:, 0].nbytes)
        self._chunks = [
            torch.empty((min(self._per_chunk, places - start), *shape), dtype=kv.dtype, pin_memory=pinned)
            for start in range(0, places, self._per_chunk)
        ]
        self._places = places

    def spill(self, kv: Tensor, pairs: Sequence[tuple[int, int]]) -> None:
        """Enqueue copies of whole pages (page, place) of the cache `kv` to here."""
        for page, place in pairs:
            self._at(place).copy_(kv[:, page], non_blocking=True)

    def fetch(self, kv: Tensor, pairs: Sequence[tuple[int, int]]) -> None:
        """Enqueue copies of (place, page) from here to the cache `kv`."""
        for place, page in pairs:
            kv[:, page].copy_(self._at(place), non_blocking=True)

    def measure(self, kv: Tensor, pages: int, wait: Callable[[], None]) -> float:
        """Seconds that a page takes one way, by moving some of the first `pages`; others may have no memory.

        `wait` returns once the copies are done.
        """
        pairs = [(index, index) for index in range(min(_TRIAL_PAGES, self._places, pages))]
        rounds = []
        for _ in range(_TRIALS):  # the first is for what is set up on first use
            wait()
            started = time.perf_counter()
            self.spill(kv, pairs)
            wait()
            rounds.append((time.perf_counter() - started) / len(pairs))
        return min(rounds)

    def _at(self, place: int) -> Tensor:
        return self._chunks[place // self._per_chunk][place % self._per_chunk]
