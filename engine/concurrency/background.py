"""`start_background`: runs a coroutine in a task of the event loop itself; any other task may wait for it and end it.

A task group belongs to the task that enters it. An engine that is opened in one task and closed in another, as in
fixtures and notebooks, cannot use one. Next to read: life/lifespan.py.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Coroutine
from contextvars import copy_context
from typing import Any

import anyio
from anyio.lowlevel import current_token

__all__ = ["start_background"]

_running: set[Any] = set()
"""The running tasks: asyncio itself holds no reference to a task that waits."""


def start_background(run: Callable[[], Coroutine[Any, Any, None]], stop: Callable[[], object], name: str) -> None:
    """Start a task that no cancel scope of the caller reaches, with the caller's context variables.

    On asyncio it is a plain task, which the event loop cancels when it ends. On trio it is a system task: `stop` is
    called when the main task has ended, and trio waits for `run` to return.

    Args:
        run: The coroutine function. It raises only the cancellation of its task, `KeyboardInterrupt` and `SystemExit`,
            which asyncio raises out of its event loop.
        stop: Makes `run` return; may be called more than once, even after `run` has returned.
        name: Name of the task, for debuggers.
    """
    native: Any = current_token().native_token
    if hasattr(native, "create_task"):
        task = native.create_task(run(), name=name)
        _running.add(task)
        task.add_done_callback(_ended)
    else:
        trio = sys.modules["trio"]
        trio.lowlevel.spawn_system_task(_run_in_trio, run, stop, name=name, context=copy_context())


def _ended(task: Any) -> None:
    _running.discard(task)
    if not task.cancelled():
        task.exception()  # asyncio has raised it already and need not log it as well


async def _run_in_trio(run: Callable[[], Coroutine[Any, Any, None]], stop: Callable[[], object]) -> None:
    """Run to the end although the end of the event loop cancels the task: `run` may have threads to wait for."""

    async def stop_when_cancelled() -> None:
        try:
            await anyio.sleep_forever()
        finally:
            stop()

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(stop_when_cancelled)
        try:
            await run()
        except (KeyboardInterrupt, SystemExit):
            pass  # raised in `aclose`; raised here, in a system task, it would be an internal error of trio
        tasks.cancel_scope.cancel()
