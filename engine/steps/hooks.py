"""Runs hooks, which are a caller's own code within a generation, and checks their results; does not act on them."""

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
"""Hook that is called with each token of a choice and returns whether the choice ends there."""


def check_hook(hook: object, field: str) -> None:
    """Reject a hook that cannot be called.

    Raises:
        InvalidParams: `hook` is not callable.
    """
    if not callable(hook):
        raise InvalidParams(f"{field}: must be callable, got {type(hook).__name__}", field=field, value=hook)


def asks_to_stop(stop_when: StopWhen, token: Token, seconds: float) -> bool:
    """Return the answer of `stop_when`, which may take `seconds`.

    Raises:
        HookFailed: The hook raised, took longer, or returned something other than a bool.
    """
    started = time.perf_counter()
    try:
        answer = stop_when(token)
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # cancellations too: they concern code within the hook, not the engine
        raise HookFailed(f"stop_when raised {type(error).__name__} at token {token.position}") from error
    spent = time.perf_counter() - started
    if spent > seconds:
        raise HookFailed(f"stop_when took {spent:.3f} s at token {token.position}, where a hook has {seconds:g}")
    if type(answer) is not bool:
        kind = f"{type(answer).__module__}.{type(answer).__qualname__}".removeprefix("builtins.")
        raise HookFailed(f"stop_when must return a bool, got {kind} at token {token.position}")
    return answer


class HookThread:
    """A thread that calls hooks one after the other, off the event loop, and abandons a call that takes too long.

    Python cannot end a call. A call that does not return in time goes on in its thread, which is no longer waited for;
    another thread makes the calls after it.
    """

    def __init__(self, post: Poster, seconds: float) -> None:
        """Start no thread before the first call.

        Args:
            post: Callback that hands results to the event loop.
            seconds: Longest time that one call may take.
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
        """Drop queued calls, wait for the running one until its time is up, and join the threads; blocks."""
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
            del item, call, done, result, error  # drop references while waiting for the next call
        caller.calls.put(None)
        caller.thread.join()


_Call: TypeAlias = tuple[Callable[[], Any], Callable[[Any, BaseException | None], None]]


class _Caller:
    """A thread that makes calls until it receives None."""

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
            except BaseException as raised:  # raised again when the result is awaited
                error = raised
            self.results.put((result, error))
            del call, result, error
