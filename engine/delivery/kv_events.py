"""`KvEvents`: tells a router outside of additions to and evictions from the prefix cache, and of the engine's load.

Owns a bounded buffer for each reader; nobody waits for one. A reader that falls behind is told to start again. Next to
read: scheduling/memory/page_log.py.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import TypeAlias
from weakref import WeakSet

import anyio

from headrace.engine.concurrency.threads import Poster
from headrace.engine.errors import EngineCrashed
from headrace.engine.scheduling.memory.page_log import PageLog, PageRemoved, PageStored
from headrace.engine.scheduling.scheduler import Scheduler

__all__ = ["KvEvent", "KvEvents", "KvLoad", "KvReset", "KvWatch"]

_ROOM = 8192  # events that a reader may leave unread


@dataclass(frozen=True, slots=True)
class KvReset:
    """Forget all known pages of this engine: events for the pages that it has follow."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KvLoad:
    """The engine's load at this moment; only the latest of these is kept for a reader."""

    waiting: int
    running: int
    paused: int
    pages: int
    """Pages of the pool; 0 while the engine sleeps."""
    pages_held: int
    """Pages that requests hold."""
    pages_cached: int
    """Pages that nobody holds, kept for their prefix."""

    @classmethod
    def of(cls, scheduler: Scheduler) -> KvLoad:
        """Return the figures of this moment."""
        pool = scheduler.pool
        return cls(
            waiting=scheduler.roster.num_waiting,
            running=scheduler.roster.num_running,
            paused=scheduler.roster.num_paused,
            pages=pool.num_pages,
            pages_held=pool.held,
            pages_cached=pool.cached,
        )


KvEvent: TypeAlias = KvReset | PageStored | PageRemoved | KvLoad


class KvEvents:
    """An async iterator of `KvEvent`, for one task; ends when the engine closes."""

    def __init__(self, log: PageLog, load: KvLoad) -> None:
        """Begin with all pages that are in the cache."""
        self._log = log
        self._load = load
        self._told: KvLoad | None = None
        self._events: deque[KvEvent] = deque()
        self._is_behind = True
        self._closed = False
        self._crashed: EngineCrashed | None = None
        self._alarm = anyio.Event()
        self._post = Poster()

    def __aiter__(self) -> KvEvents:
        """Return the reader itself."""
        return self

    async def __anext__(self) -> KvEvent:
        """Return the next event, in the order in which the events happened; `KvLoad` if there is no other.

        Raises:
            EngineCrashed: The engine's step loop died.
            RuntimeError: The call comes from another event loop or thread.
        """
        self._post.check_here()
        while True:
            if self._is_behind:
                self._is_behind = False
                self._events.extend((KvReset(), *self._log.present()))
            if self._events:
                return self._events.popleft()
            if self._load != self._told:
                self._told = self._load
                return self._load
            if self._crashed is not None:
                raise self._crashed.with_traceback(None)
            if self._closed:
                raise StopAsyncIteration
            self._alarm = anyio.Event()
            await self._alarm.wait()

    def put(self, event: KvEvent) -> None:
        """Take in an event; `tell` wakes the reader."""
        if self._is_behind:
            return
        if len(self._events) < _ROOM:
            self._events.append(event)
        else:
            self._events.clear()
            self._is_behind = True

    def tell(self, load: KvLoad) -> None:
        """Wake the reader if there is anything new."""
        self._load = load
        if self._events or self._is_behind or load != self._told:
            self._alarm.set()

    def close(self, crashed: EngineCrashed | None) -> None:
        """End the reader: no more events will come."""
        self._closed = True
        self._crashed = crashed
        self._alarm.set()


class KvWatch:
    """All readers of one scheduler."""

    def __init__(self, scheduler: Scheduler) -> None:
        """Start without readers."""
        self._scheduler = scheduler
        self._readers: WeakSet[KvEvents] = WeakSet()
        self.is_watched = False
        """Whether there may be readers, which `tell` has to be called for."""

    def open(self) -> KvEvents:
        """Return a new reader. It counts while somebody holds it; without readers, nothing is logged."""
        log = self._scheduler.pool.log
        log.start(self._put)
        self.is_watched = True
        reader = KvEvents(log, KvLoad.of(self._scheduler))
        self._readers.add(reader)
        return reader

    def tell(self) -> None:
        """Tell the readers of all changes since the last call."""
        if self._readers:
            load = KvLoad.of(self._scheduler)
            for reader in list(self._readers):
                reader.tell(load)
        else:
            self._scheduler.pool.log.stop()
            self.is_watched = False

    def close(self, crashed: EngineCrashed | None) -> None:
        """End all readers: no more events will come."""
        for reader in list(self._readers):
            reader.close(crashed)

    def _put(self, event: PageStored | PageRemoved) -> None:
        for reader in list(self._readers):
            reader.put(event)
