"""Hooks: a caller's own code in the middle of a generation, held to what it promised; never what is done about it."""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Callable
from typing import Any, TypeAlias

from headrace.engine.concurrency.threads import Outcome, Poster
from headrace.engine.errors import HookFailed, InvalidParams
from headrace.engine.events import Token

__all__ = ["HookThread", "StopWhen", "asks_to_stop", "check_hook"]

StopWhen: TypeAlias = Callable[[Token], bool]
"""Whether a choice ends with the token that it is given."""


def check_hook(hook: object, field: str) -> None:
    """Refuse what cannot be called.

    Raises:
        InvalidParams: It is neither None nor callable.
    """
    if hook is not None and not callable(hook):
        raise InvalidParams(f"{field}: must be callable, got {type(hook).__name__}", field=field, value=hook)


def asks_to_stop(stop_when: StopWhen, token: Token, seconds: float) -> bool:
    """Call `stop_when`, which has so many seconds.

    Raises:
        HookFailed: It raised, took longer, or returned something other than a bool.
    """
    started = time.perf_counter()
    try:
        answer = stop_when(token)
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # a cancellation, too: it is of whatever the hook looked at, and not of the engine
        raise HookFailed(f"stop_when raised {type(error).__name__} at token {token.position}") from error
    spent = time.perf_counter() - started
    if spent > seconds:
        raise HookFailed(f"stop_when took {spent:.3f} s at token {token.position}, where a hook has {seconds:g}")
    if type(answer) is not bool:
        kind = f"{type(answer).__module__}.{type(answer).__qualname__}".removeprefix("builtins.")
        raise HookFailed(f"stop_when must return a bool, got {kind} at token {token.position}")
    return answer


class HookThread:
    """Calls hooks one after the other beside the event loop, and leaves behind a call that takes too long.

    Python cannot end a call. One that does not return in time goes on in its thread, which nobody waits for any more;
    another thread takes the calls that come after it.
    """

    def __init__(self, post: Poster, seconds: float) -> None:
        """Start nothing before the first call.

        Args:
            post: How results get back.
            seconds: That one call may take.
        """
        self._post = post
        self._seconds = seconds
        self._calls: queue.SimpleQueue[_Call | None] = queue.SimpleQueue()
        self._watcher: threading.Thread | None = None

    def submit(self, call: Callable[[], Any], done: Callable[[Any, BaseException | None], None]) -> None:
        """Queue `call`; `done(result, error)` then runs on the event loop, with `HookFailed` if it took too long."""
        if self._watcher is None:
            self._watcher = threading.Thread(target=self._watch, name="headrace-hooks", daemon=True)
            self._watcher.start()
        self._calls.put((call, done))

    def close(self) -> None:
        """Drop what is queued, wait for the call that runs as long as it may take, and join the threads; blocks."""
        with contextlib.suppress(queue.Empty):
            while True:
                self._calls.get_nowait()
        if self._watcher is not None:
            self._calls.put(None)
            self._watcher.join()

    def _watch(self) -> None:
        caller = _Caller()
        while (item := self._calls.get()) is not None:
            call, done = item
            caller.calls.put(call)
            try:
                result, error = caller.results.get(timeout=self._seconds)
            except queue.Empty:
                caller.calls.put(None)
                caller = _Caller()
                what = f"logits_processor took longer than the {self._seconds:g} s that it has"
                result, error = None, HookFailed(what)
            self._post(Outcome(done, result, error))
            del item, call, done, result, error  # keep nothing alive while waiting for the next call
        caller.calls.put(None)
        caller.thread.join()


_Call: TypeAlias = tuple[Callable[[], Any], Callable[[Any, BaseException | None], None]]


class _Caller:
    """A thread that makes calls until it is given None."""

    def __init__(self) -> None:
        self.calls: queue.SimpleQueue[Callable[[], Any] | None] = queue.SimpleQueue()
        self.results: queue.SimpleQueue[tuple[Any, BaseException | None]] = queue.SimpleQueue()
        self.thread = threading.Thread(target=self._run, name="headrace-hook", daemon=True)
        self.thread.start()

    def _run(self) -> None:
        while (call := self.calls.get()) is not None:
            result, error = None, None
            try:
                result = call()
            except BaseException as raised:  # raised where the result is awaited
                error = raised
            self.results.put((result, error))
            del call, result, error
