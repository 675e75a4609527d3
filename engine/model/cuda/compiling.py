"""`compiles`: whether kernels of ops/cuda/csrc are available; if not, warns of what is slower; knows no kernel."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor

__all__ = ["compiles"]

logger = logging.getLogger("headrace.engine")


def compiles(builds: Iterable[Callable[[], object]], without: str) -> bool:
    """Call all of `builds` at once and return whether all succeeded; the engine can do without these kernels.

    Args:
        builds: Each takes a kernel from the cache or from a wheel, or compiles it.
        without: Beginning of the warning in the log, which says what is slower if a kernel is missing.
    """
    try:
        with ThreadPoolExecutor() as pool:
            list(pool.map(lambda build: build(), builds))
    except (RuntimeError, OSError) as error:
        logger.warning("%s: a kernel was not compiled: %s", without, error)
        return False
    return True
