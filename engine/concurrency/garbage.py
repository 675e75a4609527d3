"""`not_collected`: a while in which Python's garbage collector stays out of the way; collects nothing itself."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["not_collected"]


@contextmanager
def not_collected() -> Iterator[None]:
    """Collect no garbage meanwhile, in any thread; afterwards as before."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()
