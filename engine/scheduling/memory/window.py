"""`Window`: which pages of a request attention still reads where every layer has a sliding window; holds no page.

A token attends to itself and the `size - 1` tokens before it (Beltagy et al., 2020). Pages before these are given back.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Window"]


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
