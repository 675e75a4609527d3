"""`Window`: which pages of a request attention still reads where every layer has a sliding window; holds no page.

A token attends to itself and the `size - 1` tokens before it (Beltagy et al., 2020). Pages before these are given back.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from headrace.engine.scheduling.memory.pages import PagePool
from headrace.engine.scheduling.plan import PageEntry
from headrace.engine.scheduling.request import Request

__all__ = ["Window", "match_last", "slid_entries"]


@dataclass(frozen=True, slots=True)
class Window:
    """The longest attention window of a model's layers, in pages."""

    size: int | None
    """Tokens in the window; None if some layer attends to all tokens."""
    page_size: int
    """Tokens in a page."""

    def first_page(self, position: int) -> int:
        """Return the index in the sequence of the first page that the token at `position`, or a later one, reads."""
        return 0 if self.size is None else max(0, position - self.size + 1) // self.page_size

    def fewest_pages(self, tokens: int) -> int:
        """Return the fewest pages with which `tokens` tokens can be computed, if need be a page's worth at a time."""
        whole = -(-tokens // self.page_size)
        return whole if self.size is None else min(whole, -(-self.size // self.page_size) + 1)


def match_last(pool: PagePool, keys: Sequence[bytes], window: Window) -> tuple[int, list[int]]:
    """Return the pages that attention reads behind the longest prefix of `keys` for which all of these are there.

    Returns:
        The index of the first of these pages in the sequence, and the pages; the caller must `share` them.
    """
    run, first, end = 0, 0, 0
    for index, key in enumerate(keys):
        if pool.page_of(key) is None:
            run = index + 1
        elif run <= window.first_page((index + 1) * pool.page_size):
            first, end = window.first_page((index + 1) * pool.page_size), index + 1
    return first, pool.match(keys[first:end])


def slid_entries(request: Request) -> list[PageEntry]:
    """Return entries for the pages of `request` that slid out of the window, which name a page that it holds.

    A device may gather masked pages, too, and must not come across the number of a page that does not exist.
    """
    held = request.place.pages[:1]
    return [PageEntry(request.row, place, page) for page in held for place in range(request.place.first_page)]
