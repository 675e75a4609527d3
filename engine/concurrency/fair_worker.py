"""`FairWorker`: threads that run the blocking calls of several tenants in turns; decides nothing about their order.

Next to read: fair_queue.py, which decides it.
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
"""Wakes a thread, which then looks for calls elsewhere."""


class FairWorker(Worker):
    """A `Worker` for the calls of tenants, which take turns, and for the engine's own, which come before them.

    `submit` and `run` are for the engine's own calls; `submit_for`, also passed to `ask`, is for those of tenants.
    A tenant is charged with the seconds that its calls take in a thread.
    """

    def __init__(self, name: str, post: Poster, *, threads: int = 1, most_of_one: int | None = None) -> None:
        """Start the threads.

        Args:
            name: Name of the threads, for debuggers.
            post: How results get back.
            threads: How many calls may run at a time.
            most_of_one: How many calls of one tenant may run at a time; None is any number.
        """
        self._turns: FairQueue[Call] = FairQueue(most_of_one)
        self._own: deque[Call] = deque()
        self._lock = threading.Lock()
        super().__init__(name, post, threads=threads)

    def submit(self, call: Callable[[], T], done: Callable[[T | None, BaseException | None], None]) -> None:
        """Queue a call of the engine's own before those of all tenants; `done` as for `Worker.submit`."""
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
            tenant: Whose turn it is to be; None is a tenant like any other.
            call: Runs in a thread.
            done: Gets its result or its error.
            cost: Orders it among the calls of its tenant, the cheapest first.
        """
        with self._lock:
            self._turns.put(tenant, Call(call, done), cost)
        self._calls.put(_RING)

    def drop(self, error: BaseException) -> None:
        """End every tenant's waiting calls with `error` and leave those that run alone. Called on the event loop."""
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
        """Take up the next call; its turn is None where it is the engine's own."""
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
