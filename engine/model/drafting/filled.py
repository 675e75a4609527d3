"""`FilledPages`: how much of each page a draft model has read; plain numbers, whatever the device.

The target writes every position of a page in order, and the draft model follows later, or not at all. So of each page
the first positions are filled. Owns no page. Next to read: ../cpu/draft_model.py.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

__all__ = ["FilledPages"]


class FilledPages:
    """Number of filled positions of each page, on the device and in host memory."""

    def __init__(self, pages: int, page_size: int) -> None:
        """Start with empty pages of `page_size` tokens."""
        self._size = page_size
        self._counts: NDArray[np.int64] = np.zeros(pages, np.int64)
        self._hosts: NDArray[np.int64] = np.zeros(0, np.int64)

    def resize(self, pages: int) -> None:
        """Go on with another number of pages; those beyond are dropped, and new ones are empty."""
        kept = self._counts[:pages]
        self._counts = np.concatenate((kept, np.zeros(pages - len(kept), np.int64)))

    def open_host(self, places: int) -> None:
        """Make room for pages in host memory."""
        self._hosts = np.zeros(places, np.int64)

    def spill(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Note that pages were copied to host memory: pairs (page, place)."""
        pages, places = np.array(pairs, np.int64).T
        self._hosts[places] = self._counts[pages]

    def fetch(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Note that pages were copied back: pairs (place, page)."""
        places, pages = np.array(pairs, np.int64).T
        self._counts[pages] = self._hosts[places]

    def copy(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Note that pages were copied: pairs (source, destination), all sources read before any page is written."""
        sources, targets = np.array(pairs, np.int64).T
        self._counts[targets] = self._counts[sources]

    def overwrite(self, pages_P: NDArray[np.int64], start: int) -> None:
        """Note that the target writes a row's positions from `start` on.

        Args:
            pages_P: Pages of the row up to the last position that is written, int64.
            start: First position that is written.
        """
        first = start // self._size
        page = pages_P[first]
        self._counts[page] = min(int(self._counts[page]), start % self._size)
        self._counts[pages_P[first + 1 :]] = 0

    def fill(self, pages_P: NDArray[np.int64], start: int, end: int) -> None:
        """Note that the draft model has read a row's positions from `start` to `end`, all before them being filled.

        Args:
            pages_P: Pages of the row up to the last of these positions, int64.
            start: First position.
            end: Position behind the last one.
        """
        self._counts[pages_P[start // self._size : -1]] = self._size
        self._counts[pages_P[-1]] = end - (len(pages_P) - 1) * self._size

    def first_open(self, pages_P: NDArray[np.int64]) -> int:
        """Return how many positions are filled from the beginning of these pages on, without a gap."""
        counts_P = self._counts[pages_P]
        (partial,) = np.nonzero(counts_P < self._size)
        if not len(partial):
            return len(pages_P) * self._size
        return int(partial[0]) * self._size + int(counts_P[partial[0]])
