"""`Changes`: what is to be done to a runner between two steps, one after another; never does any of it by itself."""

from __future__ import annotations

from collections import deque
from collections.abc import Awaitable, Callable
from typing import NamedTuple

import anyio

from headrace.engine.errors import EngineCrashed, HeadraceError

__all__ = ["Changes"]


class _Change(NamedTuple):
    carry_out: Callable[[], Awaitable[None]]
    done: anyio.Event
    errors: list[Exception]


class Changes:
    """A queue between those who want something changed and the step loop."""

    def __init__(self) -> None:
        """Start empty."""
        self._waiting: deque[_Change] = deque()

    def __bool__(self) -> bool:
        return bool(self._waiting)

    async def ask(self, carry_out: Callable[[], Awaitable[None]], wake: Callable[[], None]) -> None:
        """Have the step loop, which `wake` wakes, carry out a change; it does so even if the caller is cancelled.

        Raises:
            Exception: What `carry_out` raised.
        """
        change = _Change(carry_out, anyio.Event(), [])
        self._waiting.append(change)
        wake()
        await change.done.wait()
        if change.errors:
            raise change.errors[0]

    async def carry_out_next(self) -> None:
        """For the step loop, with nothing in flight: carry out the first change.

        Raises:
            EngineCrashed: The device failed; who asked is told, too.
        """
        change = self._waiting.popleft()
        try:
            await change.carry_out()
        except Exception as error:
            change.errors.append(error)
            if isinstance(error, EngineCrashed):
                raise
        finally:
            change.done.set()

    def drop(self, error: HeadraceError) -> None:
        """End every change that waits with `error`."""
        while self._waiting:
            change = self._waiting.popleft()
            change.errors.append(error)
            change.done.set()
