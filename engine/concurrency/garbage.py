"""`not_collected`: keeps Python's garbage collector off for a while; collects nothing itself."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["not_collected"]


@contextmanager
def not_collected() -> Iterator[None]:
    """Collect no garbage within the block, in any thread; then restore the collector."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()
