"""`compiles`: whether kernels of our own can be compiled, and a warning of what is slower without; knows no kernel."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor

__all__ = ["compiles"]

logger = logging.getLogger("headrace.engine")


def compiles(builds: Iterable[Callable[[], object]], without: str) -> bool:
    """Call all of `builds` at once; False, and a warning that begins with `without`, where one of them cannot.

    Wheels of compiled kernels lack those of our own, so that they need a compiler.
    """
    try:
        with ThreadPoolExecutor() as pool:
            list(pool.map(lambda build: build(), builds))
    except (RuntimeError, OSError) as error:
        logger.warning("%s: a kernel was not compiled: %s", without, error)
        return False
    return True
