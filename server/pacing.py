"""`Pacer`: keeps all streams together below a rate of events; tokens that wait go out merged, none is ever dropped."""

from __future__ import annotations

import time
from collections.abc import Callable

import anyio

__all__ = ["Pacer"]

_WINDOW = 0.05


class Pacer:
    """A budget of events for each short window of time, shared by all streams of a server.

    A stream that finds the budget spent waits for the next window. Waiting streams share one timer, so that pacing
    costs less than the events it saves.
    """

    def __init__(self, events_per_second: float, clock: Callable[[], float] = time.monotonic) -> None:
        """Allow so many events a second."""
        self._budget = max(1, int(events_per_second * _WINDOW))
        self._clock = clock
        self._left = self._budget
        self._ends = 0.0
        self._next: anyio.Event | None = None

    async def turn(self) -> None:
        """Take the right to send one event, waiting for it if need be."""
        while not self._take():
            if self._next is not None:
                await self._next.wait()
                continue
            mine = self._next = anyio.Event()  # whoever comes first keeps the time for all
            try:
                await anyio.sleep(max(0.0, self._ends - self._clock()))
            finally:
                self._next = None
                mine.set()

    def _take(self) -> bool:
        now = self._clock()
        if now >= self._ends:
            self._ends = now + _WINDOW
            self._left = self._budget
        if self._left <= 0:
            return False
        self._left -= 1
        return True
