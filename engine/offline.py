"""`LLM`: an engine for code without an event loop; owns the thread and loop it runs on, never what is asked of it.

A call is made in the caller's thread and answered on that loop; all that crosses goes through `_Host`. This is not
anyio's blocking portal: handing that a call cannot be interrupted, and closing it waits, which no collector may.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import queue
import threading
import weakref
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from contextvars import Context, copy_context
from functools import partial
from operator import length_hint
from types import TracebackType
from typing import Any, Self, Unpack, overload

import anyio

from headrace.engine.engine import Engine, Prompt
from headrace.engine.errors import EngineStopped, HeadraceError, InvalidParams
from headrace.engine.events import Completion
from headrace.engine.many import KeepingErrors, ManyOptions, ManyParams, check_many, run_many
from headrace.engine.options import EngineOptions
from headrace.engine.params import SamplingParams
from headrace.engine.threads import Poster

__all__ = ["LLM"]

_DEFAULT_PARAMS = SamplingParams()
_EXIT_SECONDS = 10.0  # an interpreter that exits waits so long for the steps in flight, and no longer


class LLM:
    """An open engine for scripts and notebooks: `LLM("path/to/model").generate(prompts)`.

    Works with or without an event loop in the calling thread, and from several threads at once: all that they ask runs
    in one batch. `close`, leaving `with`, dropping the last reference or the end of the interpreter closes it.
    """

    def __init__(self, model: str | os.PathLike[str] | Engine, **options: Unpack[EngineOptions]) -> None:
        """Load the model and wait for it.

        Args:
            model: A model folder, a `.gguf` file, a hub id, or an engine that was not opened yet.
            options: The fields of `EngineConfig`, which `EngineOptions` (options.py) describes; none with an engine,
                which has its own.

        Raises:
            InvalidParams: An option is unknown or out of its range.
            ModelRejected: The model's files cannot be used.
            DeviceUnavailable: The device is not there.
        """
        if isinstance(model, Engine) and options:
            field, value = next(iter(options.items()))
            raise InvalidParams(f"{field}: an engine has its own options", field=field, value=value)
        self._host = _Host(model if isinstance(model, Engine) else Engine(model, **options))
        self._host.open()
        finalizer = weakref.finalize(self, self._host.stop)  # runs in any thread, amid anything: it only posts
        finalizer.atexit = False  # the host sees to that itself, since it also waits

    @overload
    def generate(  # type: ignore[overload-overlap]  # a str is one prompt, although it is an iterable of them
        self, prompts: Prompt, params: ManyParams = ..., **options: Unpack[ManyOptions]
    ) -> Completion: ...
    @overload
    def generate(  # type: ignore[overload-overlap]
        self, prompts: Prompt, params: ManyParams = ..., **options: Unpack[KeepingErrors]
    ) -> Completion | HeadraceError: ...
    @overload
    def generate(
        self, prompts: Iterable[Prompt], params: ManyParams = ..., **options: Unpack[ManyOptions]
    ) -> list[Completion]: ...
    @overload
    def generate(
        self, prompts: Iterable[Prompt], params: ManyParams = ..., **options: Unpack[KeepingErrors]
    ) -> list[Completion | HeadraceError]: ...
    def generate(
        self,
        prompts: Prompt | Iterable[Prompt],
        params: ManyParams = _DEFAULT_PARAMS,
        *,
        progress: bool = True,
        return_errors: bool = False,
        **asked: Any,
    ) -> Any:
        """Run a generation for a prompt, or for each of many, and wait for the end; Ctrl-C cancels them.

        Args:
            prompts: One prompt (text, token ids or a chat), or any iterable of prompts. An iterable other than a list
                or a tuple is taken from in the calling thread, as room comes.
            params: For all prompts, or a sequence of as many.
            progress: Show a bar on stderr while there are many prompts.
            return_errors: Put the error of a request that fails in the place of its answer, and go on.
            asked: `adapter`, `tenant`, `cache_salt`, `priority`, `deadline` and hooks, as in `Engine.stream`.

        Returns:
            The answer, or the list of answers in the order of the prompts.

        Raises:
            InvalidParams: Not prompts, or not one `SamplingParams` for each.
            RuntimeError: It is called by a `stop_when` of its own, which would wait for itself.
            EngineStopped: It is closed, or was closed meanwhile.
            HeadraceError: The first request that failed; among many, its message names `prompts[index]`.
        """
        one = _is_one(prompts)
        given: Any = [prompts] if one else prompts
        check_many(given, params)
        call = _Call(given)

        async def ask(engine: Engine) -> None:
            shown, kept = progress and not one, return_errors or one
            call.answers = await run_many(engine, call.prompts, params, progress=shown, return_errors=kept, **asked)

        self._host.wait_for(call, ask)
        if not one:
            return call.answers
        [answer] = call.answers
        if isinstance(answer, HeadraceError) and not return_errors:
            raise answer
        return answer

    def load_adapter(self, name: str, path: str | os.PathLike[str]) -> None:
        """Load what `generate(..., adapter=name)` wears, and wait for it; as `Engine.adapters.load`.

        Raises:
            AdapterRejected: The name, the files or the size do not fit; nothing changes.
            InvalidParams: The engine was opened for no adapters.
            RuntimeError: A `stop_when` calls it, which would wait for itself.
            EngineStopped: It is closed, or was closed meanwhile.
        """

        async def load(engine: Engine) -> None:
            await engine.adapters.load(name, path)

        self._host.wait_for(_Call([]), load)

    def close(self) -> None:
        """Cancel what runs, return all memory and join all threads; may be called more than once.

        Raises:
            EngineCrashed: The step loop had died.
        """
        self._host.stop()
        self._host.join()

    def __enter__(self) -> Self:
        """Return the LLM itself."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close; an error that leaves the block goes before one of closing."""
        try:
            self.close()
        except HeadraceError:
            if error is None:
                raise


def _is_one(prompts: object) -> bool:
    """Whether this is a prompt, well-formed or not, rather than an iterable of prompts."""
    if isinstance(prompts, str) or not isinstance(prompts, Iterable):
        return True
    return isinstance(prompts, Sequence) and len(prompts) > 0 and not isinstance(prompts[0], str | Sequence)


class _Pulled(AsyncIterator[Any]):
    """A caller's iterable as the event loop sees it: every item is taken in the caller's thread."""

    def __init__(self, iterable: Iterable[Any], ask: Callable[[], None]) -> None:
        self._length = length_hint(iterable, -1)
        self._iterator = iter(iterable)
        self._ask = ask
        self._taken: list[Any] = []

    def take(self) -> list[Any]:
        """The next item as a list of one, or an empty list; in the caller's thread."""
        for item in self._iterator:
            return [item]
        return []

    def give(self, taken: list[Any]) -> None:
        """Hand over what was taken; on the event loop."""
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


class _Call:
    """One `generate`, or a load, made in the caller's thread and answered on the event loop."""

    def __init__(self, prompts: Any) -> None:
        # the caller waits here: True wants a prompt taken, False is the end
        self.news: queue.SimpleQueue[bool] = queue.SimpleQueue()
        self.ended = threading.Event()
        self.answers: list[Any] = []
        self.error: BaseException | None = None
        direct = isinstance(prompts, list | tuple) or not isinstance(prompts, Iterable)
        self.pulled = None if direct else _Pulled(prompts, partial(self.news.put, True))
        self.prompts = prompts if self.pulled is None else self.pulled
        self._scope: anyio.CancelScope | None = None

    async def run(self, ask: Callable[[], Awaitable[None]]) -> None:
        """Answer it, on the event loop."""
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
        """End it unanswered, on the event loop."""
        if self._scope is not None:
            self._scope.cancel()
        else:
            self.end(None)

    def end(self, error: BaseException | None) -> None:
        """Let the caller go on; only the first counts."""
        if not self.ended.is_set():
            self.error = error
            self.ended.set()
            self.news.put(False)


class _Host:
    """The thread of one engine and its event loop; holds no reference to the `LLM`, so that this may be collected."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._open = False
        self._settled = threading.Event()
        """The engine has opened, or never will."""
        self._post: Poster | None = None
        self._stopping = False
        self._lock = threading.Lock()
        self._over = False
        """The event loop takes no more posts; set under the lock."""
        self._calls: set[_Call] = set()
        self._error: BaseException | None = None
        # a context of its own: the caller's may say that an event loop runs
        self._thread = threading.Thread(target=Context().run, args=(self._run,), name="headrace-llm", daemon=True)

    # -- in the caller's thread -------------------------------------------------------------------------------------

    def open(self) -> None:
        """Start the thread and wait until the engine is open, or raise why it is not."""
        self._thread.start()
        atexit.register(self._at_exit)
        try:
            self._settled.wait()
        except BaseException:  # Ctrl-C while the model loads: the thread ends when that has
            self.stop()
            raise
        if not self._open:
            self.join()

    def wait_for(self, call: _Call, ask: Callable[[Engine], Awaitable[None]]) -> None:
        """Run `call` on the event loop and wait for its end, taking prompts as it wants them."""
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
                with contextlib.suppress(KeyboardInterrupt):  # a second Ctrl-C must not leave it running unwatched
                    self._cancel(call)
                    cancelled = True
            call.ended.wait()
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
        """Wait for the thread's end and raise, once, what ended it."""
        self._thread.join(timeout)
        error, self._error = self._error, None
        if error is not None:
            raise error

    def _begin(self, call: _Call, ask: Callable[[Engine], Awaitable[None]]) -> None:
        with self._lock:
            if self._stopping or self._over:
                raise EngineStopped("the LLM is closed")
            self._calls.add(call)
        self._send(partial(self._start, call, ask))

    def _cancel(self, call: _Call) -> None:
        with self._lock:
            over = self._over
            self._calls.add(call)  # whatever becomes of the post, its end will be told
        if over:
            call.end(None)
        self._send(call.cancel)

    def _send(self, job: Callable[[], object]) -> None:
        if self._post is not None:
            self._post(partial(self._context.run, job))

    def _at_exit(self) -> None:
        self.stop()
        self._thread.join(_EXIT_SECONDS)

    # -- in the thread ----------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            anyio.run(self._main, backend="asyncio")
        except BaseException as error:  # raised by whoever joins
            self._error = error
        finally:
            self._settled.set()
            atexit.unregister(self._at_exit)

    async def _main(self) -> None:
        self._left = anyio.Event()
        try:
            with anyio.CancelScope() as self._opening:
                self._context = copy_context()  # where anyio finds the event loop; a post brings its sender's
                self._post = Poster()
                if self._stopping:  # before there was a way to post
                    self._leave()
                async with self._engine, anyio.create_task_group() as self._tasks:
                    self._open = True
                    self._settled.set()
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

    def _start(self, call: _Call, ask: Callable[[Engine], Awaitable[None]]) -> None:
        if not self._left.is_set() and not call.ended.is_set():
            self._tasks.start_soon(self._answer, call, ask)

    async def _answer(self, call: _Call, ask: Callable[[Engine], Awaitable[None]]) -> None:
        await call.run(partial(ask, self._engine))
