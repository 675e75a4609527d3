"""`Alarm`: one task sleeps until it is woken, again and again; knows the event loops, and not what is waited for."""

from __future__ import annotations

from typing import Any

import anyio
from anyio.lowlevel import current_token

__all__ = ["Alarm"]


class Alarm:
    """Wakes one task at a time, on the event loop's thread.

    With asyncio's loops a sleep is a bare future, 1.5 µs from sleep to sleep; an `anyio.Event` for each makes that
    4 µs, and each streamed event has one.
    """

    __slots__ = ("_make_future", "sleeping")

    def __init__(self) -> None:
        """Make an alarm for which no task sleeps yet."""
        self._make_future: Any = None
        """Makes what a task awaits: the event loop's own futures, or `anyio.Event` where it has none; None at first."""
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
        """Wait for `ring`; only where no task sleeps."""
        if self._make_future is None:
            loop: Any = current_token().native_token
            self._make_future = getattr(loop, "create_future", anyio.Event)
        self.sleeping = sleeping = self._make_future()
        try:
            await (sleeping.wait() if isinstance(sleeping, anyio.Event) else sleeping)
        finally:
            self.sleeping = None
