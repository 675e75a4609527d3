"""`LoggedProgress`: reports progress of long work to the log and to its thread's watcher; never knows the work."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

__all__ = ["LoggedProgress", "Watcher", "watched", "weights_read"]

logger = logging.getLogger("headrace.engine")

Watcher = Callable[[int, int], object]
"""Function that is called with the amount done and the whole amount."""
_watcher: ContextVar[Watcher | None] = ContextVar("headrace progress watcher", default=None)


@contextmanager
def watched(watcher: Watcher | None) -> Iterator[None]:
    """Within the block, make each `LoggedProgress` of this thread call `watcher` as well."""
    token = _watcher.set(watcher)
    try:
        yield
    finally:
        _watcher.reset(token)


class LoggedProgress:
    """Receives the amount done and the whole amount, and logs them at most every few seconds.

    Work that is done before the first interval is over leaves no line.
    """

    def __init__(self, describe: Callable[[int, int], str], *, seconds: float = 3.0) -> None:
        """Begin the first interval.

        Args:
            describe: Returns a line for the amount done and the whole amount.
            seconds: Least time between two lines, and before the first.
        """
        self._describe = describe
        self._seconds = seconds
        self._told = time.monotonic()
        self._watcher = _watcher.get()

    def __call__(self, done: int, total: int) -> None:
        """Tell the watcher, and log a line if it is time for one."""
        if self._watcher is not None:
            self._watcher(done, total)
        now = time.monotonic()
        if now - self._told >= self._seconds:
            self._told = now
            logger.info("%s", self._describe(done, total))


def weights_read(done: int, total: int, what: str = "weights") -> str:
    """Return "loading weights: 40 % of 15.2 GB" for numbers of bytes, with the name of what is read."""
    size = f"{total / 1e9:.1f} GB" if total >= 1e9 else f"{total / 1e6:.0f} MB"
    return f"loading {what}: {100 * done // max(total, 1)} % of {size}"
