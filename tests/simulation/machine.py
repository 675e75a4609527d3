"""A machine of virtual time: an event loop that jumps to its next timer, and threads that are only timers.

Everything runs in one thread, in an order that the seed decides; nothing here knows what it runs.
"""

from __future__ import annotations

import asyncio
import queue
import random
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from headrace.engine.concurrency.fair_queue import FairQueue
from headrace.engine.concurrency.fair_worker import FairWorker
from headrace.engine.concurrency.threads import Call, Outcome, Poster, Worker
from headrace.engine.steps.hooks import HookThread

__all__ = ["Machine", "VirtualLoop"]

_TURN = 1e-5  # seconds that one turn of the event loop takes: who only spins must see time pass
_TURNS = 100_000  # of a life of seconds: more means that it goes round in circles


class VirtualLoop(asyncio.BaseEventLoop):
    """An asyncio event loop that never waits: where nothing is ready, it is at once as late as its next timer."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.turns = 0
        self.most_turns = _TURNS
        self.broken: BaseException | None = None
        """Ends the run."""
        self.complaints: list[str] = []
        """What asyncio would have logged: exceptions that nobody saw."""
        self._selector = self
        self._on_turn: Callable[[], object] = lambda: None
        self.set_exception_handler(lambda loop, context: self.complaints.append(str(context)))

    def each_turn(self, look: Callable[[], object]) -> None:
        """Call `look` between any two turns; what it raises ends the run."""
        self._on_turn = look

    def time(self) -> float:
        """Seconds since the loop was made."""
        return self.now

    def jump(self, seconds: float) -> None:
        """The machine slept: all timers that were due meanwhile are due now."""
        self.now += seconds

    # -- what asyncio's base class asks of a selector ------------------------------------------------------------------

    def select(self, timeout: float | None) -> list[Any]:
        self._on_turn()
        if self.broken is not None:
            raise self.broken
        self.turns += 1
        assert self.turns < self.most_turns, f"still busy after {self.turns} turns of the event loop"
        assert timeout is not None, "everybody waits, and nothing is left that could wake anybody"
        self.now += timeout + _TURN
        return []

    def _process_events(self, events: object) -> None:
        pass

    def _write_to_self(self) -> None:
        pass


class Machine:
    """The threads and the clock of one engine, on a `VirtualLoop`."""

    def __init__(self, seed: object, seconds: Callable[[str, random.Random], float] | None = None) -> None:
        """A machine that is idle.

        Args:
            seed: Decides how long every call in a thread takes.
            seconds: Of one call in the thread of that name; None draws between nothing and 50 ms.
        """
        self.loop = VirtualLoop()
        self.ahead = 0.0
        """Seconds that the engine's clock is ahead of the event loop's."""
        self.workers: list[_VirtualWorker | _VirtualFairWorker] = []
        self._chance = random.Random(f"machine {seed}")
        self._seconds = seconds or (lambda name, chance: chance.choice([0.0, 0.001, 0.05]) * chance.random())

    def require(self, holds: bool, what: str) -> None:
        """Assert in a place whose errors an engine would take for the device's, and make something of."""
        if not holds:
            self.breaks(AssertionError(what))
            raise AssertionError(what)

    def breaks(self, error: BaseException) -> None:
        """Something does not hold: end the run before the next turn of the event loop."""
        self.loop.broken = self.loop.broken or error

    def clock(self) -> float:
        """Seconds, as the engine sees them."""
        return self.loop.now + self.ahead

    def make_worker(self, name: str, post: Poster, *, threads: int = 1) -> Worker:
        """A worker for an engine, as `Worker` itself."""
        worker = _VirtualWorker(self, name, post)
        self.workers.append(worker)
        return worker

    def make_fair_worker(
        self, name: str, post: Poster, *, threads: int = 1, most_of_one: int | None = None
    ) -> FairWorker:
        """A worker for the calls of tenants, as `FairWorker` itself."""
        worker = _VirtualFairWorker(self, name, post, most_of_one)
        self.workers.append(worker)
        return worker

    def make_hooks(self, post: Poster, seconds: float) -> HookThread:
        """The thread of hooks, which never take too long."""
        return _VirtualHooks(post, self.make_worker("headrace-hooks", post))

    def seconds(self, name: str, call: Callable[[], Any]) -> float:
        """How long `call` takes in the thread of that name: a step as long as its device says."""
        of = getattr(getattr(call, "func", call), "__self__", None)
        seconds: float | None = getattr(of, "seconds", None)
        return self._seconds(name, self._chance) if seconds is None else seconds

    @contextmanager
    def running(self) -> Iterator[VirtualLoop]:
        """The event loop, closed at the end, with all that still stands in it."""
        try:
            yield self.loop
        finally:
            self.loop.close()

    def check_still(self) -> None:
        """Assert that every thread was ended and that none has anything left to do."""
        for worker in self.workers:
            assert worker.closed and not worker.busy, f"{worker.name} was not ended"


class _VirtualThread:
    """One thread, one call at a time; calls run on the event loop's thread when their time is over."""

    name: str
    _machine: Machine
    _post: Poster
    _running: tuple[asyncio.TimerHandle, Callable[[], None]] | None = None
    closed = False

    @property
    def busy(self) -> bool:
        raise NotImplementedError

    def close(self, *, join: bool = True) -> None:
        """What is left runs now: whoever joins a thread waits for it. Who does not may never see it end."""
        self.closed = True
        while join and self._running is not None:
            timer, finish = self._running
            timer.cancel()
            finish()

    async def leave(self, seconds: float) -> None:
        """What is left runs now."""
        self.close()

    def _begin(self) -> tuple[Call, Any] | None:
        """The next call that waits, and what `_end` is told of it."""
        raise NotImplementedError

    def _end(self, turn: Any, seconds: float) -> None:
        """A call has ended that took so long."""

    def _take_up(self) -> None:
        if self._running is not None or (begun := self._begin()) is None:
            return
        call, turn = begun
        seconds = self._machine.seconds(self.name, call.call)

        def finish() -> None:
            result, error = None, None
            try:
                result = call.call()
            except BaseException as raised:  # re-raised where the result is awaited
                error = raised
            self._running = None
            self._end(turn, seconds)
            self._post(Outcome(call.done, result, error))
            self._take_up()

        timer = self._machine.loop.call_later(seconds, finish)
        self._running = timer, finish


class _VirtualWorker(_VirtualThread, Worker):
    """A worker on a virtual thread."""

    def __init__(self, machine: Machine, name: str, post: Poster) -> None:
        self._calls = queue.SimpleQueue()
        self._machine, self._post, self.name = machine, post, name

    @property
    def busy(self) -> bool:
        return self._running is not None or not self._calls.empty()

    def submit(self, call: Callable[[], Any], done: Callable[[Any, BaseException | None], None]) -> None:
        assert not self.closed, f"{self.name} is given work after its end"
        super().submit(call, done)
        self._take_up()

    def _begin(self) -> tuple[Call, Any] | None:
        call = None if self._calls.empty() else self._calls.get_nowait()
        return None if call is None else (call, None)


class _VirtualFairWorker(_VirtualThread, FairWorker):
    """A worker for the calls of tenants on a virtual thread."""

    def __init__(self, machine: Machine, name: str, post: Poster, most_of_one: int | None) -> None:
        self._turns, self._own = FairQueue(most_of_one), deque()
        self._lock, self._calls = threading.Lock(), queue.SimpleQueue()
        self._machine, self._post, self.name = machine, post, name

    _begin = FairWorker._begin
    _end = FairWorker._end

    @property
    def busy(self) -> bool:
        return self._running is not None or len(self._turns) > 0 or len(self._own) > 0

    def submit(self, call: Callable[[], Any], done: Callable[[Any, BaseException | None], None]) -> None:
        assert not self.closed, f"{self.name} is given work after its end"
        super().submit(call, done)
        self._take_up()

    def submit_for(
        self,
        tenant: str | None,
        call: Callable[[], Any],
        done: Callable[[Any, BaseException | None], None],
        *,
        cost: float = 0.0,
    ) -> None:
        assert not self.closed, f"{self.name} is given work after its end"
        super().submit_for(tenant, call, done, cost=cost)
        self._take_up()


class _VirtualHooks(HookThread):
    """Hooks on a virtual thread."""

    def __init__(self, post: Poster, worker: Worker) -> None:
        self._post = post
        self._worker = worker

    def submit(self, call: Callable[[], Any], done: Callable[[Any, BaseException | None], None]) -> None:
        self._worker.submit(call, done)

    def close(self) -> None:
        """Drop what is queued, and wait for the call that runs."""
        while not self._worker._calls.empty():
            self._worker._calls.get_nowait()
        self._worker.close()
