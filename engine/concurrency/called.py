"""`Called` lets straight code await calls that tell their end by a callback; `run_inline` runs that code with no task.

What needs no wait is done within `run_inline` itself, so the event loop does not turn. The code goes on where the end
of a call is told, on the event loop's thread. Nothing here knows which event loop that is.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Generator
from functools import partial
from typing import Any, Generic, Self, TypeVar

from headrace.engine.concurrency.threads import Done
from headrace.engine.errors import as_headrace

__all__ = ["Called", "run_inline"]

T = TypeVar("T")


class Called(Generic[T]):
    """A call to be awaited by code that `run_inline` runs: the `await` begins it and goes on when its end is told."""

    __slots__ = ("_call", "_error", "_is_done", "_result", "_what", "resume")

    def __init__(self, call: Callable[[Done], None], what: str) -> None:
        """Begin nothing yet.

        Args:
            call: Function that begins the call and tells `Done` of its result or error, within it or later.
            what: Message of the `HeadraceError` that is raised in place of an error without a type.
        """
        self._call = call
        self._what = what
        self._is_done = False
        self._result: Any = None
        self._error: BaseException | None = None
        self.resume: Callable[[], None] | None = None
        """Function that runs the awaiting code on; None while it has not been suspended."""

    def __await__(self) -> Generator[Self, None, T]:
        """Begin the call and return its result.

        Raises:
            HeadraceError: The call ended with an error.
        """
        self._call(self._end)
        if not self._is_done:
            yield self
        if self._error is not None:
            raise as_headrace(self._error, self._what)
        return self._result  # type: ignore[no-any-return]

    def _end(self, result: Any, error: BaseException | None) -> None:
        self._is_done = True
        self._result = result
        self._error = error
        if self.resume is not None:
            self.resume()


def run_inline(steps: Coroutine[Called[Any], None, None]) -> None:
    """Run `steps` to its first `Called` that has to be waited for, and on from there when that one ends.

    `steps` awaits nothing but `Called`, and handles its errors itself: those after the first wait would reach nobody.
    """
    try:
        awaited = steps.send(None)
    except StopIteration:
        return
    awaited.resume = partial(run_inline, steps)
