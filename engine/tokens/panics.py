"""Turns any error or panic of a library written in Rust into a typed error; never decides what follows.

A panic reaches Python as `pyo3_runtime.PanicException`, which derives from `BaseException` so that no handler of
`Exception` sees it; each library has its own class of that name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NoReturn

from headrace.engine.errors import HeadraceError

__all__ = ["is_failure", "raise_typed", "typed"]


def is_failure(error: BaseException) -> bool:
    """Return whether `error` is a failure, an exception or a panic; exits, cancellations and Ctrl-C are none."""
    return isinstance(error, Exception) or type(error).__name__ == "PanicException"


def raise_typed(error: BaseException, fail: Callable[[str], HeadraceError]) -> NoReturn:
    """Raise what `fail` makes of an exception's or a panic's message; typed errors, exits and Ctrl-C as they are.

    Raises:
        HeadraceError: Unless `error` is an exit or Ctrl-C.
    """
    if isinstance(error, HeadraceError) or not is_failure(error):
        raise error
    raise fail(str(error)) from error


@contextmanager
def typed(fail: Callable[[str], HeadraceError]) -> Iterator[None]:
    """Do with an error of the block as `raise_typed` does.

    Raises:
        HeadraceError: The block raised.
    """
    try:
        yield
    except BaseException as error:
        raise_typed(error, fail)
