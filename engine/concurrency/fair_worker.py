"""`FairWorker`: threads that run the blocking calls of several tenants in turns; decides nothing about their order.

Next to read: fair_queue.py, which decides the order.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Final, TypeVar

from headrace.engine.concurrency.fair_queue import FairQueue, FairTurn
from headrace.engine.concurrency.threads import Call, Poster, Worker

__all__ = ["FairWorker"]

T = TypeVar("T")
_RING: Final = Call(lambda: None, lambda result, error: None)
"""Call that wakes a thread, which then looks for calls in the queues of `FairWorker`."""


class FairWorker(Worker):
    """A `Worker` for the calls of tenants, which take turns, and for the engine's own, which come first.

    `submit` and `run` are for the engine's own calls; `submit_for`, also as an argument of `ask`, for those of tenants.
    A tenant is charged with the seconds that its calls take in a thread.
    """

    def __init__(self, name: str, post: Poster, *, threads: int = 1, most_of_one: int | None = None) -> None:
        """Start the threads.

        Args:
            name: Name of the threads, for debuggers.
            post: Sends results to the event loop.
            threads: Number of calls that may run at a time.
            most_of_one: Number of calls of one tenant that may run at a time; None for any number.
        """
        self._turns: FairQueue[Call] = FairQueue(most_of_one)
        self._own: deque[Call] = deque()
        self._lock = threading.Lock()
        super().__init__(name, post, threads=threads)

    def submit(self, call: Callable[[], T], done: Callable[[T | None, BaseException | None], None]) -> None:
        """Queue a call of the engine's own before those of all tenants; `done` is an argument of `Worker.submit`."""
        self._own.append(Call(call, done))
        self._calls.put(_RING)

    def submit_for(
        self,
        tenant: str | None,
        call: Callable[[], T],
        done: Callable[[T | None, BaseException | None], None],
        *,
        cost: float = 0.0,
    ) -> None:
        """Queue a call of a tenant, from any thread; `done(result, error)` then runs on the event loop.

        Args:
            tenant: The tenant whose turn is taken; None is a tenant like any other.
            call: Runs in a thread.
            done: Function of the result and the error of the call.
            cost: Order of the call among those of its tenant, the lowest first.
        """
        with self._lock:
            self._turns.put(tenant, Call(call, done), cost)
        self._calls.put(_RING)

    def drop(self, error: BaseException) -> None:
        """End every tenant's waiting calls with `error`, and let running ones go on. Called on the event loop."""
        with self._lock:
            dropped = self._turns.clear()
        for call in dropped:
            call.done(None, error)

    def _run(self) -> None:
        while self._calls.get() is not None:
            while (begun := self._begin()) is not None:
                call, turn = begun
                began = time.perf_counter()
                self._perform(call)
                self._end(turn, time.perf_counter() - began)
                del begun, call, turn  # keep nothing alive while waiting for the next call

    def _begin(self) -> tuple[Call, FairTurn[Call] | None] | None:
        """Take up the next call; return it with its turn, which is None for the engine's own."""
        with self._lock:
            if self._own:
                return self._own.popleft(), None
            turn = self._turns.take()
        return None if turn is None else (turn.item, turn)

    def _end(self, turn: FairTurn[Call] | None, seconds: float) -> None:
        """Charge the tenant of a call that has ended."""
        if turn is not None:
            with self._lock:
                self._turns.finish(turn, seconds)
