"""`HostPool`: pages of keys and values in host memory, and copies to and from there; never decides which to move."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence

import torch
from torch import Tensor

from headrace.engine.model.shared.memory import free_host_bytes
from headrace.ops.host_memory import host_pieces

__all__ = ["HostPool"]

_RUN_BYTES = 16 << 20  # copied at once, through a buffer of the same size on the device
_TRIAL_PAGES = 32
_TRIALS = 4


class HostPool:
    """Room for a number of pages of one paged cache, whose pages lie along its second dimension."""

    def __init__(self, kv: Tensor, places: int, *, pinned: bool, promised: int = 0) -> None:
        """Allocate the memory.

        Args:
            kv: `[layers, pages, ...]`, any dtype.
            places: Pages to have room for.
            pinned: Whether to pin the memory, so that copies need not wait for the host; only where a GPU holds `kv`.
            promised: Bytes of free memory that others will use, who have not yet written to them.

        Raises:
            MemoryError: The host has less free memory.
        """
        needed = places * kv[:, 0].nbytes
        if needed > (free := free_host_bytes() - promised):
            raise MemoryError(f"{needed} bytes for pages, of which {free} are free")
        shape = (kv.shape[0], *kv.shape[2:])
        self._per_run = max(1, _RUN_BYTES // kv[:, 0].nbytes) if pinned else 1
        pieces = host_pieces(places, kv[:, 0].nbytes, pinned=pinned)
        self._chunks = [piece.view(kv.dtype).view(-1, *shape) for piece in pieces]
        self._per_chunk = max(map(len, self._chunks), default=1)
        self._places = places

    @property
    def nbytes(self) -> int:
        """Memory of all places, in bytes."""
        return sum(chunk.nbytes for chunk in self._chunks)

    def spill(self, kv: Tensor, pairs: Sequence[tuple[int, int]]) -> None:
        """Enqueue copies of whole pages of the cache `kv` to this pool, from pairs (page, place)."""
        for _ in self.spills(kv, pairs):
            pass

    def spills(self, kv: Tensor, pairs: Sequence[tuple[int, int]]) -> Iterator[list[int]]:
        """Do what `spill` does, and yield the pages of each copy once it is enqueued."""
        for place, pages in self._runs((place, page) for page, place in pairs):
            here = self._at(place, len(pages))
            if len(pages) == 1:
                here[0].copy_(kv[:, pages[0]], non_blocking=True)
            else:
                here.copy_(_words(kv).index_select(0, _indices(pages, kv)).view(kv.dtype), non_blocking=True)
            yield pages

    def fetch(self, kv: Tensor, pairs: Sequence[tuple[int, int]]) -> None:
        """Enqueue copies from this pool to the cache `kv`, from pairs (place, page)."""
        for place, pages in self._runs(pairs):
            here = self._at(place, len(pages))
            if len(pages) == 1:
                kv[:, pages[0]].copy_(here[0], non_blocking=True)
            else:
                there = torch.empty_like(here, device=kv.device, pin_memory=False).copy_(here, non_blocking=True)
                _words(kv).index_copy_(0, _indices(pages, kv), there.view(torch.uint8))

    def measure(self, kv: Tensor, pages: int, wait: Callable[[], None]) -> float:
        """Return the seconds that a page takes one way, measured on the first `pages`; others may have no memory.

        `wait` must return once the copies are done.
        """
        pairs = [(index, index) for index in range(min(_TRIAL_PAGES, self._places, pages))]
        rounds = []
        for _ in range(_TRIALS):  # the first trial includes setup
            wait()
            started = time.perf_counter()
            self.spill(kv, pairs)
            wait()
            rounds.append((time.perf_counter() - started) / len(pairs))
        return min(rounds)

    def _runs(self, pairs: Iterable[tuple[int, int]]) -> Iterator[tuple[int, list[int]]]:
        """Yield (first place, pages for the places from there on) of runs of (place, page) that one copy can move."""
        first, pages = 0, list[int]()
        for place, page in sorted(pairs):
            follows = place == first + len(pages) and place % self._per_chunk and len(pages) < self._per_run
            if pages and not follows:
                yield first, pages
            if not pages or not follows:
                first, pages = place, []
            pages.append(page)
        if pages:
            yield first, pages

    def _at(self, place: int, count: int) -> Tensor:
        start = place % self._per_chunk
        return self._chunks[place // self._per_chunk][start : start + count]


def _words(kv: Tensor) -> Tensor:
    """Return a view as uint8 [pages, layers, ...]: torch cannot copy an 8-bit cache by index otherwise."""
    return kv.view(torch.uint8).transpose(0, 1)


def _indices(pages: Sequence[int], kv: Tensor) -> Tensor:
    return torch.tensor(pages, dtype=torch.int64).to(kv.device, non_blocking=True)
