"""`Mailbox`: the unread items of one reader; putting never waits, and reading takes all items.

Owns unread items only; never decides the fate of a slow reader. `Alarm` wakes that reader, on either event loop.
"""

from __future__ import annotations

from typing import Any, Generic, TypeVar

import anyio
from anyio.lowlevel import current_token

__all__ = ["Alarm", "Mailbox"]

T = TypeVar("T")


class Mailbox(Generic[T]):
    """A merging queue from the step loop to one reader, both on the event loop's thread."""

    __slots__ = ("_alarm", "_closed", "_error", "_items")

    def __init__(self) -> None:
        """Start open and empty."""
        self._items: list[T] = []
        self._closed = False
        self._error: BaseException | None = None
        self._alarm = Alarm()

    def __len__(self) -> int:
        """Return the number of unread items."""
        return len(self._items)

    @property
    def awaited(self) -> bool:
        """Whether a task waits for items."""
        return self._alarm.sleeping is not None

    def put(self, item: T) -> int:
        """Add an item and wake the reader; return the number of unread items."""
        items = self._items
        items.append(item)
        if self._alarm.sleeping is not None:
            self._alarm.ring()
        return len(items)

    def close(self, error: BaseException | None = None) -> None:
        """End the stream: the reader gets the remaining items, then `error` if there is one. Later calls change
        nothing."""
        if self._closed:
            return
        self._closed = True
        self._error = error
        self._alarm.ring()

    async def take(self) -> list[T]:
        """Wait for items and take all of them; return an empty list once closed and read to the end.

        Raises:
            RuntimeError: Another task is already waiting.
            BaseException: The mailbox was closed with it, and all earlier items were taken.
        """
        if self.awaited:
            raise RuntimeError("two tasks read the same stream")
        while not self._items and not self._closed:
            await self._alarm.sleep()
        items, self._items = self._items, []
        if not items and self._error is not None:
            raise self._error.with_traceback(None)  # it may be raised often and must not collect tracebacks
        return items


class Alarm:
    """Wakes one task at a time, on the event loop's thread.

    On asyncio's loops a sleep is a bare future, 1.5 µs from sleep to sleep; an `anyio.Event` would take 4 µs, and each
    streamed event has a sleep.
    """

    __slots__ = ("_make_future", "sleeping")

    def __init__(self) -> None:
        """Make an alarm for which no task sleeps yet."""
        self._make_future: Any = None
        """Function that makes the awaited object, the event loop's own future or an `anyio.Event`; None at first."""
        self.sleeping: Any = None
        """The future or event that a sleeping task awaits, or None. A plain field, since every token reads it."""

    def ring(self) -> None:
        """Wake the task that sleeps, if one does."""
        sleeping = self.sleeping
        if sleeping is None:
            return
        if isinstance(sleeping, anyio.Event):
            sleeping.set()
        elif not sleeping.done():
            sleeping.set_result(None)

    async def sleep(self) -> None:
        """Wait for `ring`; must not be called while another task sleeps."""
        if self._make_future is None:
            loop: Any = current_token().native_token
            self._make_future = getattr(loop, "create_future", anyio.Event)
        self.sleeping = sleeping = self._make_future()
        try:
            await (sleeping.wait() if isinstance(sleeping, anyio.Event) else sleeping)
        finally:
            self.sleeping = None
