"""`Pacer`: keeps all streams together below a rate of events; tokens that wait go out merged, none is ever dropped."""

from __future__ import annotations

import time
from collections.abc import Callable

import anyio

__all__ = ["Pacer"]

_WINDOW = 0.01  # seconds, about: whoever waits for the same window is woken at once, and holds the event loop so long


class _Window:
    """A short span of time, and the number of events that may still go out in it."""

    __slots__ = ("left", "opened", "starts")

    def __init__(self, starts: float, left: int) -> None:
        self.starts = starts
        self.left = left
        self.opened: anyio.Event | None = None
        """Event that is set when the window starts; None while nobody waits for it."""


class Pacer:
    """A budget of events for each window, shared by all streams of a server.

    A stream takes its place in the earliest window that has room, and sleeps until then: each waits once, in the order
    of arrival, and the streams of one window share one timer.
    """

    def __init__(self, events_per_second: float, clock: Callable[[], float] = time.monotonic) -> None:
        """Allow `events_per_second`; `clock` returns seconds."""
        self._budget = max(1, round(events_per_second * _WINDOW))
        self._span = self._budget / events_per_second
        self._clock = clock
        self._latest = _Window(0.0, 0)

    async def turn(self) -> None:
        """Take the right to send one event, waiting for it if need be."""
        now, window = self._clock(), self._latest
        if now >= window.starts + self._span:
            self._latest = window = _Window(now, self._budget)
        elif not window.left:
            self._latest = window = _Window(window.starts + self._span, self._budget)
        window.left -= 1
        if window.starts <= now:
            return
        if window.opened is not None:
            await window.opened.wait()
            return
        window.opened = anyio.Event()  # whoever comes first keeps the time for all
        try:
            await anyio.sleep(window.starts - now)
        finally:
            window.opened.set()
