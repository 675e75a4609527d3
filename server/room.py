"""`Room`: bytes that requests may hold, of which one key may have half; counts and refuses, never holds anything."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from headrace.server.errors import ApiError

__all__ = ["Room"]


class Room:
    """A bound of bytes for all keys together. A request that is larger than the bound is let in alone."""

    def __init__(self, most: int, one: int, full: Callable[[], ApiError], key_full: Callable[[], ApiError]) -> None:
        """Start empty.

        Args:
            most: Bytes that all keys together may hold.
            one: Bytes that a key may hold in any case.
            full: Function that makes the refusal where too little is left.
            key_full: Function that makes the refusal where the key holds too much.
        """
        self._most = most
        self._one = one
        self._full = full
        self._key_full = key_full
        self.held = 0
        """Bytes that are held."""
        self._of: Counter[str] = Counter()

    @contextmanager
    def hold(self, key: str, size: int) -> Iterator[None]:
        """Hold `size` bytes for a key.

        Raises:
            ApiError: The key holds too much, or all keys together do.
        """
        if self._of[key] + size > max(self._most // 2, self._one, size):
            raise self._key_full()
        if self.held + size > max(self._most, self._one, size):
            raise self._full()
        self._of[key] += size
        self.held += size
        try:
            yield
        finally:
            self.held -= size
            self._of[key] -= size
            if not self._of[key]:
                del self._of[key]
