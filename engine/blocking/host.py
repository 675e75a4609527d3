"""`Host`: runs one engine and its event loop in a thread, and answers the calls of other threads there.

Everything that crosses between threads goes through it. It is not anyio's blocking portal: a call that is handed to a
portal cannot be interrupted, and closing a portal waits, which no collector may do. Callers wait at queues, never at a
`threading.Event`: Ctrl-C can strike inside an event's wait while it takes its lock back, and then it releases a lock
that the event loop's thread holds. Next to read: offline.py.
"""

from __future__ import annotations

import atexit
import contextlib
import queue
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextvars import Context, copy_context
from functools import partial
from operator import length_hint
from typing import Any, TypeVar

import anyio

from headrace.engine.concurrency.threads import Poster
from headrace.engine.engine import Engine
from headrace.engine.errors import EngineStopped
from headrace.engine.many.bars import OpeningBar

__all__ = ["Host", "HostCall"]

T = TypeVar("T")
EXIT_SECONDS = 10.0
"""Most seconds that a closing interpreter waits for the steps in flight."""


class _Pulled(AsyncIterator[Any]):
    """A caller's iterable for the event loop: every item is taken in the caller's thread."""

    def __init__(self, iterable: Iterable[Any], ask: Callable[[], None]) -> None:
        self._length = length_hint(iterable, -1)
        self._iterator = iter(iterable)
        self._ask = ask
        self._taken: list[Any] = []

    def take(self) -> list[Any]:
        """Return the next item as a list of one, or an empty list; called in the caller's thread."""
        for item in self._iterator:
            return [item]
        return []

    def give(self, taken: list[Any]) -> None:
        """Hand over the taken items; called on the event loop."""
        self._taken = taken
        self._given.set()

    def __length_hint__(self) -> int:
        return self._length if self._length >= 0 else NotImplemented

    async def __anext__(self) -> Any:
        self._given = anyio.Event()
        self._ask()
        await self._given.wait()
        if not self._taken:
            raise StopAsyncIteration
        return self._taken.pop()


class HostCall:
    """One `generate`, or a load, made in the caller's thread and answered on the event loop."""

    def __init__(self, prompts: Any) -> None:
        # The caller waits here: True asks it to take a prompt, False is the end.
        self.news: queue.SimpleQueue[bool] = queue.SimpleQueue()
        self.ended = False
        self.answers: list[Any] = []
        self.error: BaseException | None = None
        direct = isinstance(prompts, list | tuple) or not isinstance(prompts, Iterable)
        self.pulled = None if direct else _Pulled(prompts, partial(self.news.put, True))
        self.prompts = prompts if self.pulled is None else self.pulled
        self._scope: anyio.CancelScope | None = None

    async def run(self, ask: Callable[[], Awaitable[None]]) -> None:
        """Answer the call, on the event loop, unless it was cancelled between its post and this task."""
        if self.ended:
            return
        error: BaseException | None = EngineStopped("the LLM was closed meanwhile")
        try:
            with anyio.CancelScope() as self._scope:
                await ask()
            error = None
        except Exception as raised:
            error = raised
        finally:
            self.end(error)
            del error  # its traceback holds this frame

    def cancel(self) -> None:
        """End the call unanswered, on the event loop."""
        if self._scope is not None:
            self._scope.cancel()
        else:
            self.end(None)

    def end(self, error: BaseException | None) -> None:
        """Release the caller; only the first call of this counts."""
        if not self.ended:
            self.error = error
            self.ended = True
            self.news.put(False)

    def wait(self) -> None:
        """Wait, in the caller's thread, for the end of a call that was cancelled; take no more prompts."""
        while not self.ended:  # set before the last news is put
            self.news.get()


class Host:
    """The thread of one engine and its event loop; holds no reference to the `LLM`, so that it can be collected."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._open = False
        self._settled: queue.SimpleQueue[None] = queue.SimpleQueue()
        """Holds something once the engine has opened, or never will."""
        self._post: Poster | None = None
        self._stopping = False
        self._lock = threading.Lock()
        self._over = False
        """Whether the event loop accepts no more posts; set under the lock."""
        self._calls: set[HostCall] = set()
        self._error: BaseException | None = None
        # The thread has a context of its own: the caller's may say that an event loop runs.
        self._thread = threading.Thread(target=Context().run, args=(self._run,), name="headrace-llm", daemon=True)

    # -- in the caller's thread -------------------------------------------------------------------------------------

    def open(self, *, progress: bool) -> None:
        """Start the thread and wait until the engine is open, or raise its error; `progress` shows a bar."""
        bar = OpeningBar()
        if progress:
            self._engine.on_weights = bar
        self._thread.start()
        atexit.register(self._at_exit)
        try:
            with bar:
                self._settled.get()
        except BaseException:  # Ctrl-C while the model loads: the thread ends after loading
            self.stop()
            raise
        if not self._open:
            self.join()

    def ask(self, question: Callable[[Engine], Awaitable[T]]) -> T:
        """Return the answer to a question that is put on the event loop; raises as `wait_for` does."""
        call = HostCall([])

        async def answer(engine: Engine) -> None:
            call.answers.append(await question(engine))

        self.wait_for(call, answer)
        [found] = call.answers
        return found  # type: ignore[no-any-return]

    def look(self, question: Callable[[Engine], T]) -> T:
        """Return the answer to a question that needs no wait; raises as `wait_for` does."""

        async def answer(engine: Engine) -> T:
            return question(engine)

        return self.ask(answer)

    def wait_for(self, call: HostCall, ask: Callable[[Engine], Awaitable[None]]) -> None:
        """Run `call` on the event loop and wait for its end; take prompts as the call wants them.

        Raises:
            RuntimeError: The call comes from that event loop, and would wait for itself.
            EngineStopped: The host has stopped, or stops meanwhile.
            BaseException: `ask` raised it, or it interrupted the caller; the call is cancelled then.
        """
        if threading.current_thread() is self._thread:
            raise RuntimeError(
                "an LLM cannot be asked in its own event loop, where a stop_when runs: it would wait for ever"
            )
        try:
            self._begin(call, ask)
            while call.news.get():
                if call.pulled is not None:
                    self._send(partial(call.pulled.give, call.pulled.take()))
        except BaseException:  # Ctrl-C, or an error of the caller's iterable
            cancelled = False
            while not cancelled:
                with contextlib.suppress(KeyboardInterrupt):  # a second Ctrl-C must not leave the call running
                    self._cancel(call)
                    cancelled = True
            call.wait()
            raise
        finally:
            with self._lock:
                self._calls.discard(call)
        error, call.error = call.error, None
        if error is not None:
            try:
                raise error
            finally:
                del error  # its traceback holds this frame

    def stop(self) -> None:
        """Let the thread end; returns at once, takes no lock, and may run in any thread."""
        self._stopping = True
        self._send(self._leave)

    def join(self, timeout: float | None = None) -> None:
        """Wait for the thread's end and raise, once, the error that ended it."""
        self._thread.join(timeout)
        error, self._error = self._error, None
        if error is not None:
            raise error

    def _begin(self, call: HostCall, ask: Callable[[Engine], Awaitable[None]]) -> None:
        with self._lock:
            if self._stopping or self._over:
                raise EngineStopped("the LLM is closed")
            self._calls.add(call)
        self._send(partial(self._start, call, ask))

    def _cancel(self, call: HostCall) -> None:
        with self._lock:
            over = self._over
            self._calls.add(call)  # its end is reported even if the post is lost
        if over:
            call.end(None)
        self._send(call.cancel)

    def _send(self, job: Callable[[], object]) -> None:
        if self._post is not None:
            self._post(partial(self._context.run, job))

    def _at_exit(self) -> None:
        self.stop()
        self._thread.join(EXIT_SECONDS)

    # -- in the thread ----------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            anyio.run(self._main, backend="asyncio")
        except BaseException as error:  # raised in `join`
            self._error = error
        finally:
            self._settled.put(None)
            atexit.unregister(self._at_exit)

    async def _main(self) -> None:
        self._left = anyio.Event()
        try:
            with anyio.CancelScope() as self._opening:
                self._context = copy_context()  # anyio finds the event loop here; a post brings its sender's context
                self._post = Poster()
                if self._stopping:  # `stop` came before the poster
                    self._leave()
                async with self._engine, anyio.create_task_group() as self._tasks:
                    self._open = True
                    self._settled.put(None)
                    await self._left.wait()
                    self._tasks.cancel_scope.cancel()
        finally:
            with self._lock:
                self._over = True
            for call in self._calls:
                call.end(EngineStopped("the LLM was closed meanwhile"))
            self._calls.clear()

    def _leave(self) -> None:
        self._left.set()
        if not self._open:
            self._opening.cancel()

    def _start(self, call: HostCall, ask: Callable[[Engine], Awaitable[None]]) -> None:
        if not self._left.is_set() and not call.ended:
            self._tasks.start_soon(self._answer, call, ask)

    async def _answer(self, call: HostCall, ask: Callable[[Engine], Awaitable[None]]) -> None:
        await call.run(partial(ask, self._engine))
