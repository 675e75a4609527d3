"""`Router`: follows an engine's KV events from outside, and says where they differ from what its cache holds.

It looks at the engine's pages only to compare; the engine never knows of it.
"""

from __future__ import annotations

import random

import anyio
from simulation.machine import Machine

from headrace.engine.delivery.kv_events import KvEvents, KvLoad, KvReset
from headrace.engine.engine import Engine
from headrace.engine.scheduling.memory.page_log import PageRemoved, PageStored
from headrace.engine.scheduling.scheduler import Scheduler

__all__ = ["Pages", "Router"]

_REMEMBERED = 1000


class Pages:
    """What one scheduler's cache holds, and what of it nobody was told of."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._roots: dict[str, bytes] = {}
        """Scope -> the root that requests of it begin their keys with."""
        self.untold: set[tuple[str, str]] = set()
        """(key, medium) of pages that were stored while nobody read events."""

    def held(self) -> set[tuple[str, str]]:
        """(key, medium) of every full page that a request could find."""
        pool, host = self._scheduler.pool, self._scheduler.swaps.host
        found = {(key.hex(), "device") for page, key in pool._key_of.items() if page not in pool._partly}
        return found | {(key.hex(), "host") for key in host._cached}

    def settled(self) -> None:
        """Something has happened: what is stored again, or spilled, is told of."""
        if self.untold:
            self.untold &= self.held()

    def arrived(self, root: bytes) -> None:
        """A request whose keys begin with `root` was submitted."""
        self._roots[self._scheduler.pool.log.scope(root)] = root

    def key(self, scope: str, tokens: list[int]) -> str:
        """Of the page that ends a prefix."""
        keys: list[bytes] = []
        self._scheduler.pool.extend_keys(keys, tokens, self._roots[scope])
        return keys[-1].hex()

    def load(self) -> KvLoad:
        """The figures of now."""
        return KvLoad.of(self._scheduler)

    def open(self, engine: Engine) -> KvEvents:
        """Have the engine tell of its pages."""
        if not self._scheduler.pool.log.is_on:
            self.untold = self.held()
        return engine.kv_events()


class Router:
    """One reader of events, which may be slow, and may leave and come back."""

    def __init__(self, pages: Pages, machine: Machine) -> None:
        self.load: KvLoad | None = None
        self.known: dict[tuple[str, str], PageStored] = {}
        self._seen: dict[str, PageStored] = {}
        """Pages that it was told of, those that have gone included."""
        self._unchecked: list[PageStored] = []
        self._pages = pages
        self._machine = machine

    @property
    def is_up_to_date(self) -> bool:
        """Whether the latest figures are those of now."""
        return self.load == self._pages.load()

    async def follow(self, engine: Engine, chance: random.Random, stalls: float, *, leaves: bool) -> None:
        """Read to the end, or if it `leaves` for a while."""
        events = self._pages.open(engine)
        async for event in events:
            self._take(event)
            if isinstance(event, KvLoad):
                self.check()
                if leaves and chance.random() < 0.1:
                    return
            if chance.random() < stalls:
                await anyio.sleep(chance.choice([0.0, 0.1, 2.0]))

    def _take(self, event: object) -> None:
        if isinstance(event, KvReset):
            self.known.clear()
        elif isinstance(event, PageRemoved):
            self._require((event.key, event.medium) in self.known, "a page goes that the router was never told of")
            del self.known[event.key, event.medium]
        elif isinstance(event, KvLoad):
            self.load = event
        else:
            assert isinstance(event, PageStored)
            self._require((event.key, event.medium) not in self.known, "the router is told of a page twice")
            self.known[event.key, event.medium] = self._seen[event.key] = event
            self._unchecked.append(event)

    def _check_chain(self, page: PageStored) -> None:
        """The key is that of all tokens up to the page, under its scope; some came before the router did."""
        tokens: list[int] = []
        place: PageStored | None = page
        while place is not None:
            tokens[:0] = place.tokens
            if place.parent is None:
                self._require(self._pages.key(page.scope, tokens) == page.key, "a page of other tokens than it is said")
                return
            place = self._seen.get(place.parent)

    def check(self) -> None:
        """All there was to read has been read: it knows what the cache holds."""
        while self._unchecked:
            self._check_chain(self._unchecked.pop())
        if len(self._seen) > _REMEMBERED:
            self._seen = {page.key: page for page in self.known.values()}
        known, held = self.known.keys(), self._pages.held()
        self._require(known <= held, f"the router believes in {len(known - held)} pages that have gone")
        missed = held - self._pages.untold - known
        self._require(not missed, f"the router was not told of {len(missed)} pages")

    def _require(self, holds: bool, what: str) -> None:
        self._machine.require(holds, what)
