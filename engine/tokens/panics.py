"""Turns whatever a library written in Rust raises into a typed error, its panics too; never decides what follows.

A panic reaches Python as `pyo3_runtime.PanicException`, which derives from `BaseException` so that no handler of
`Exception` sees it, and which each library has a class of its own for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from headrace.engine.errors import HeadraceError

__all__ = ["is_failure", "typed"]


def is_failure(error: BaseException) -> bool:
    """Return whether what was called failed, by an exception or a panic: no exit, cancellation or Ctrl-C is meant."""
    return isinstance(error, Exception) or type(error).__name__ == "PanicException"


@contextmanager
def typed(fail: Callable[[str], HeadraceError]) -> Iterator[None]:
    """Raise what `fail` makes of the message of an exception or a panic; typed errors, exits and Ctrl-C pass.

    Raises:
        HeadraceError: The block raised.
    """
    try:
        yield
    except HeadraceError:
        raise
    except BaseException as error:
        if not is_failure(error):
            raise
        raise fail(str(error)) from error
