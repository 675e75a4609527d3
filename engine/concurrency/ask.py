"""Runs a call in a thread for a caller who leaves at once when cancelled; `Worker.run` is for those who may not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import anyio

from headrace.engine.concurrency.threads import Done

__all__ = ["ask"]

T = TypeVar("T")


async def ask(submit: Callable[[Callable[[], T | None], Done], None], call: Callable[[], T]) -> T:
    """Run `call` in a thread; a caller who is cancelled leaves at once, and a call that waits never begins.

    Args:
        submit: Function that queues a call for a thread, such as `Worker.submit`.
        call: Runs in the thread.

    Raises:
        BaseException: `call` raised it, or the worker was told to drop its calls with it.
    """
    finished = anyio.Event()
    outcome: list[Any] = []
    left = False

    def done(result: T | None, error: BaseException | None) -> None:
        outcome[:] = result, error
        finished.set()

    submit(lambda: None if left else call(), done)
    try:
        await finished.wait()
    finally:
        left = True
    result, error = outcome
    outcome.clear()
    if error is not None:
        raise error
    return result  # type: ignore[no-any-return]
