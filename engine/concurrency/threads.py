"""Worker threads of the engine, and the one way from a thread back to the event loop; never knows what calls do.

The host may run asyncio (with any event loop) or trio: `Poster` has one implementation for each.
"""

from __future__ import annotations

import contextlib
import logging
import math
import queue
import sys
import threading
from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias, TypeVar
from weakref import WeakMethod, ref

import anyio
from anyio.lowlevel import current_token

__all__ = ["Call", "Done", "Hung", "Outcome", "Poster", "TaskWatch", "Worker", "outlast"]

T = TypeVar("T")
logger = logging.getLogger("headrace.engine")


class Hung(Exception):
    """A call did not end in its time; its thread may be busy with it for ever."""


async def outlast(event: anyio.Event, seconds: float = math.inf) -> BaseException | None:
    """Wait for `event`, at most `seconds`, even if the caller is cancelled; return the cancellation, which the caller
    then raises."""
    cancelled: BaseException | None = None
    ends = anyio.current_time() + seconds
    while not event.is_set():
        try:
            with anyio.CancelScope(deadline=ends, shield=True) as scope:
                await event.wait()
            if scope.cancelled_caught:
                break
        except anyio.get_cancelled_exc_class() as error:  # asyncio's own cancellation ignores shields
            cancelled = error
    return cancelled


class Poster:
    """Runs plain callables, from any thread, on the event loop that was current when it was made."""

    def __init__(self) -> None:
        """Remember the running event loop; must be called on it."""
        native: Any = current_token().native_token
        self._native = native
        self._post: Callable[[Callable[[], object]], object]
        self._current: Callable[[], object]
        if (post := getattr(native, "call_soon_threadsafe", None)) is not None:
            self._post = post
            self._current = sys.modules["asyncio"].get_running_loop
        else:
            self._post = native.run_sync_soon
            self._current = sys.modules["trio"].lowlevel.current_trio_token

    def __call__(self, call: Callable[[], object]) -> None:
        """Run `call` on the event loop soon; do nothing once that loop has ended."""
        with contextlib.suppress(RuntimeError):
            self._post(call)

    def check_here(self) -> None:
        """Refuse a caller who does not run on that event loop, since it would corrupt state or wait without end.

        Raises:
            RuntimeError: Another event loop runs in this thread, or none does.
        """
        try:
            found = self._current()
        except RuntimeError:  # no event loop of this kind runs in this thread
            found = None
        if found is not self._native:
            raise RuntimeError(
                "an engine, its streams and its adapters are used on the event loop that the engine was opened on: "
                "from another thread call `anyio.from_thread.run(engine.generate, ...)`, "
                "or `asyncio.run_coroutine_threadsafe(engine.generate(...), loop)`"
            )


class TaskWatch:
    """Calls a method if the asyncio task that it follows ends cancelled.

    asyncio keeps the frames of a cancelled task in a cycle, and with them all objects in their variables, until the
    garbage collector comes. trio does not, and there this does nothing.
    """

    __slots__ = ("_method", "_post", "_task")

    def __init__(self, method: Callable[[], object], post: Poster) -> None:
        """Follow no task yet.

        Args:
            method: A bound method, whose object is not kept alive.
            post: Poster of the event loop whose tasks may be followed.
        """
        self._method = WeakMethod(method)
        self._post = post
        self._task: Any = None

    def follow(self) -> None:
        """Follow the current task from now on, and no other.

        Raises:
            RuntimeError: The call comes from another event loop or thread.
        """
        asyncio = sys.modules.get("asyncio")
        try:
            task = None if asyncio is None else asyncio.current_task()
        except RuntimeError:  # trio runs here
            task = None
        if self._task is None or self._task() is not task:
            self._post.check_here()  # the result holds while the task is the same
            self.stop()
            if task is not None:
                task.add_done_callback(self._ended)
                self._task = ref(task)

    def stop(self) -> None:
        """Follow no task."""
        task = None if self._task is None else self._task()
        if task is not None:
            task.remove_done_callback(self._ended)
        self._task = None

    def _ended(self, task: Any) -> None:
        method = self._method()
        if method is not None and task.cancelled():
            method()


Done: TypeAlias = Callable[[Any, BaseException | None], None]
"""Function of a call's result and error, called on the event loop."""


class Call(NamedTuple):
    """A blocking call, and the function that is told of its end."""

    call: Callable[[], Any]
    done: Done


class Worker:
    """One thread or more that run blocking calls in order and hand their results to the event loop."""

    def __init__(self, name: str, post: Poster, *, threads: int = 1) -> None:
        """Start the threads.

        Args:
            name: Name of the threads, for debuggers.
            post: Sends results to the event loop.
            threads: Number of calls that may run at a time.
        """
        self._calls: queue.SimpleQueue[Call | None] = queue.SimpleQueue()
        self._post = post
        self._ended = anyio.Event()
        self._left = threads
        self._threads = [threading.Thread(target=self._main, name=name, daemon=True) for _ in range(threads)]
        for thread in self._threads:
            thread.start()

    def submit(self, call: Callable[[], T], done: Callable[[T | None, BaseException | None], None]) -> None:
        """Queue `call`; `done(result, error)` then runs on the event loop."""
        self._calls.put(Call(call, done))

    async def run(self, call: Callable[[], T], seconds: float = math.inf) -> T:
        """Run `call` in the thread and wait for its result, shielded from cancellation.

        Raises:
            Hung: The call takes longer than `seconds`.
            BaseException: `call` raised it.
        """
        finished = anyio.Event()
        outcome: list[Any] = [None, None]

        def done(result: T | None, error: BaseException | None) -> None:
            outcome[:] = result, error
            finished.set()

        self.submit(call, done)
        cancelled = await outlast(finished, seconds)
        if cancelled is not None:
            raise cancelled
        if not finished.is_set():
            raise Hung(f"not done after {seconds:g} seconds")
        result, error = outcome
        outcome.clear()
        if error is not None:
            raise error
        return result  # type: ignore[no-any-return]

    def drop(self, error: BaseException) -> None:
        """End every waiting call with `error`; let the running one go on. Called on the event loop."""
        with contextlib.suppress(queue.Empty):
            while True:
                item = self._calls.get_nowait()
                if item is not None:
                    item.done(None, error)

    def close(self, *, join: bool = True) -> None:
        """Finish the queued calls; join the threads, unless `join` is False because a call may never end."""
        for _ in self._threads:
            self._calls.put(None)
        for thread in self._threads if join else ():
            thread.join()

    async def leave(self, seconds: float) -> None:
        """End the threads once the queued calls are done, without ever holding up the event loop, even if cancelled.

        Args:
            seconds: Time to wait for the threads. One that is still busy then ends by itself after its call.
        """
        self.close(join=False)
        cancelled = await outlast(self._ended, seconds)
        if self._ended.is_set():
            for thread in self._threads:
                thread.join()
        else:
            logger.warning("a thread named %s is still busy; it ends when its call does", self._threads[0].name)
        if cancelled is not None:
            raise cancelled

    def _main(self) -> None:
        try:
            self._run()
        finally:
            self._post(self._one_ended)

    def _one_ended(self) -> None:
        self._left -= 1
        if not self._left:
            self._ended.set()

    def _run(self) -> None:
        while (item := self._calls.get()) is not None:
            self._perform(item)
            del item  # keep nothing alive while waiting for the next call

    def _perform(self, item: Call) -> None:
        """Run a call in this thread and send its outcome to the event loop."""
        result, error = None, None
        try:
            result = item.call()
        except BaseException as raised:  # raised again where the result is awaited
            error = raised
        self._post(Outcome(item.done, result, error))


class Outcome:
    """A finished call on its way to the event loop."""

    __slots__ = ("_done", "_error", "_result")

    def __init__(self, done: Callable[[Any, BaseException | None], None], result: object, error: BaseException | None):
        self._done = done
        self._result = result
        self._error = error

    def __call__(self) -> None:
        self._done(self._result, self._error)
