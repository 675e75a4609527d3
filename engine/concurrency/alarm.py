"""`Alarm`: lets one task sleep until it is woken, again and again; knows the event loops, but not the events."""

from __future__ import annotations

from typing import Any

import anyio
from anyio.lowlevel import current_token

__all__ = ["Alarm"]


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
