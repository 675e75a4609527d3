"""Turns whatever a library written in Rust raises into a typed error, its panics too; never decides what follows.

A panic reaches Python as `pyo3_runtime.PanicException`, which derives from `BaseException` so that no handler of
`Exception` sees it, and which each library has a class of its own for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from headrace.engine.errors import HeadraceError

__all__ = ["is_panic", "typed"]


def is_panic(error: BaseException) -> bool:
    """Return whether `error` is the panic of a library written in Rust."""
    return type(error).__name__ == "PanicException" and not isinstance(error, Exception)


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
        if not isinstance(error, Exception) and not is_panic(error):
            raise
        raise fail(str(error)) from error
