"""`Mailbox`: what one reader has not read yet; putting never waits, and reading takes all there is.

Owns unread items only; never decides what happens to a slow reader.
"""

from __future__ import annotations

from typing import Generic, TypeVar

import anyio

__all__ = ["Mailbox"]

T = TypeVar("T")


class Mailbox(Generic[T]):
    """A merging queue from the step loop to one reader, both on the event loop's thread."""

    __slots__ = ("_closed", "_error", "_items", "_waiter")

    def __init__(self) -> None:
        """Start open and empty."""
        self._items: list[T] = []
        self._closed = False
        self._error: BaseException | None = None
        self._waiter: anyio.Event | None = None

    def __len__(self) -> int:
        """Unread items."""
        return len(self._items)

    def put(self, item: T) -> None:
        """Add an item and wake the reader."""
        self._items.append(item)
        if self._waiter is not None:
            self._waiter.set()

    def close(self, error: BaseException | None = None) -> None:
        """Nothing more will come; the reader gets what is left, then `error` if there is one. Only the first counts."""
        if self._closed:
            return
        self._closed = True
        self._error = error
        if self._waiter is not None:
            self._waiter.set()

    async def take(self) -> list[T]:
        """Wait until there is something, and take all of it; an empty list once closed and read to the end.

        Raises:
            RuntimeError: Another task is already waiting.
            BaseException: What the mailbox was closed with, once everything before it was taken.
        """
        if self._waiter is not None:
            raise RuntimeError("two tasks read the same stream")
        while not self._items and not self._closed:
            self._waiter = anyio.Event()
            try:
                await self._waiter.wait()
            finally:
                self._waiter = None
        items, self._items = self._items, []
        if not items and self._error is not None:
            raise self._error.with_traceback(None)  # raised again and again, it must not collect
        return items
