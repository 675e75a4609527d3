"""`Changes` queues changes to a runner that are made between two steps, one after another; it makes none by itself."""

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


class Changes(deque[_Change]):
    """A queue of changes that the step loop carries out, the next one first."""

    async def ask(self, carry_out: Callable[[], Awaitable[None]], wake: Callable[[], None]) -> None:
        """Queue a change, `wake` the step loop and wait for the change, which is made even if the caller is cancelled.

        Raises:
            Exception: The error that `carry_out` raised.
        """
        change = _Change(carry_out, anyio.Event(), [])
        self.append(change)
        wake()
        await change.done.wait()
        if change.errors:
            raise change.errors[0]

    async def carry_out_next(self) -> None:
        """Carry out the first change; called by the step loop with nothing in flight.

        Raises:
            EngineCrashed: The device failed; the change's caller gets the same error.
        """
        change = self.popleft()
        try:
            await change.carry_out()
        except Exception as error:
            change.errors.append(error)
            if isinstance(error, EngineCrashed):
                raise
        finally:
            change.done.set()

    def drop(self, error: HeadraceError) -> None:
        """End every queued change with `error`."""
        while self:
            change = self.popleft()
            change.errors.append(error)
            change.done.set()
