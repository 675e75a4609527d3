"""`load_threads`: the threads in which a model is read and packed on the CPU; knows nothing of the work.

torch shares every large operation among a pool of threads, which spin while they wait for each other. Where something
else runs on one of the cores, that takes several times the processor time of the work itself. A load consists of many
independent parts, so each part runs in one thread from its beginning to its end, and nothing waits.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Protocol, TypeVar

from headrace.engine.model.shared.torch_threads import torch_threads, use_threads

__all__ = ["Each", "load_threads"]

A = TypeVar("A")
R = TypeVar("R")


class Each(Protocol):
    """Protocol of functions that call a function with every item and return the results in order, as `map` does."""

    def __call__(self, call: Callable[[A], R], items: Iterable[A], /) -> Iterable[R]: ...


@contextmanager
def load_threads(count: int) -> Iterator[Each]:
    """Yield an `Each` that works in `count` threads, including the calling one; torch uses one thread in each.

    After the block, torch again uses as many threads in the calling thread as before; other threads are not affected.
    """
    before = torch_threads()

    def each(call: Callable[[A], R], items: Iterable[A], /) -> list[R]:
        return _share(call, list(items), count - 1)

    use_threads(1)
    try:
        yield each
    finally:
        use_threads(before)


def _share(call: Callable[[A], R], items: list[A], helpers: int) -> list[R]:
    """Return `call` of every item; of several errors, raise that of the earliest item."""
    places = itertools.count()  # `next(places)` is atomic
    results: dict[int, R] = {}
    errors: dict[int, BaseException] = {}

    def work() -> None:
        while not errors and (place := next(places)) < len(items):
            try:
                results[place] = call(items[place])
            except BaseException as error:
                errors[place] = error

    def help_out() -> None:
        use_threads(1)
        work()

    started: list[threading.Thread] = []
    try:
        for _ in range(min(helpers, len(items) - 1)):
            helper = threading.Thread(target=help_out, name="headrace-load", daemon=True)
            helper.start()
            started.append(helper)
        work()
    finally:
        for helper in started:
            helper.join()
    if errors:
        raise errors[min(errors)]
    return [results[place] for place in range(len(items))]
