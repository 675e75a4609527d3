"""`Prefixes` finds pages that hold the start of a request or soon will; it never allocates or releases a page.

Full pages are offered under a hash of all tokens before and in them. A page that a running request is about to fill is
promised: requests with the same prefix wait for it instead of computing it again. Next to read: pages.py.
"""

from __future__ import annotations

from headrace.adapters.slots import AdapterVersion
from headrace.engine.scheduling.memory.pages import PagePool
from headrace.engine.scheduling.memory.turns import KeptTurns
from headrace.engine.scheduling.memory.window import Window, match_last
from headrace.engine.scheduling.request import Request, State

__all__ = ["Prefixes", "root_of"]


class Prefixes:
    """Prefix sharing between the requests of one scheduler."""

    def __init__(self, pool: PagePool, window: Window, *, enabled: bool) -> None:
        """Share nothing yet; with `enabled` False only the choices of one prompt share pages."""
        self._window = window
        self.promises: dict[bytes, Request] = {}
        """Hash of a page that is not full yet -> the running request that will fill it."""
        self._pool = pool
        self.enabled = enabled
        self.turns = KeptTurns(pool, self.offer, enabled=enabled)
        """Pages of turns of conversations that have ended."""

    def find(self, request: Request, step: int) -> list[int] | None:
        """Return the pages that `step` may read and that hold the start of `request`; None if it should wait.

        If attention has a window, these are the last pages of the start, from `Placement.first_page` on, which is set.
        """
        size = self._pool.page_size
        leader = request.leader
        if leader is not None and not (request.preemptions or request.asked.alone or leader.failed):
            needed = len(request.tokens) - 1
            if leader.place.copied == step:
                return None
            if leader.place.pages and not leader.discard and leader.launched_before(step) >= needed:
                if leader.place.first_page <= self._window.first_page(needed):
                    request.place.found = needed
                    request.place.first_page = leader.place.first_page
                    return leader.place.pages[: -(-needed // size) - leader.place.first_page]
            elif leader.state is State.WAITING or (leader.state is State.RUNNING and not leader.leaving):
                return None
        request.place.found = 0
        before = request.before
        if before is not None and before.row >= 0:
            return None  # the last launched steps of the previous turn are about to end
        usable = self.usable(request)
        if request.place.host_places:  # the rest is in host memory
            pages = [] if request.place.first_page else self._pool.match(usable)
            request.place.found = len(pages) * size
            return pages
        if self._window.size is None:
            request.place.first_page, pages = 0, self._pool.match(usable)
        else:
            request.place.first_page, pages = match_last(self._pool, usable, self._window)
        end = request.place.first_page + len(pages)
        request.place.found = end * size
        if end < len(usable) and usable[end] in self.promises:
            return None
        if before is not None and self.enabled:
            pages += self.turns.rest(request, before.computed)
        return pages

    def usable(self, request: Request) -> list[bytes]:
        """Return the hashes of the full pages that `request` may share."""
        if not self.enabled:
            return []
        self._pool.extend_keys(request.place.keys, request.tokens, request.asked.root)
        return request.place.keys[: request.cacheable // self._pool.page_size]

    def promise(self, request: Request) -> None:
        """Promise the full pages that `request` is about to compute."""
        for key in request.place.keys[request.place.registered :]:
            self.promises.setdefault(key, request)

    def offer(self, request: Request) -> None:
        """Offer the pages of `request` that are full, planned and of committed tokens to requests with the same prefix.

        If a step may skip the row, as with a grammar, only computed pages are offered. What steps in flight write
        beyond what is sure, if drafts are right, is not offered.
        """
        if not self.enabled:
            return
        reached = request.sure if request.asked.grammar is None else request.computed
        full = min(reached, len(request.tokens)) // self._pool.page_size
        if request.place.registered >= full:
            return
        self._pool.extend_keys(request.place.keys, request.tokens, request.asked.root)
        for index in range(request.place.registered, full):
            key = request.place.keys[index]
            self.remember(request, index)
            if self.promises.get(key) is request:
                del self.promises[key]
        request.place.registered = full

    def keeps(self, request: Request) -> bool:
        """Return whether a running `request` that loses its row would find all but its last page in the cache."""
        size = self._pool.page_size
        return request.planned - min(request.place.registered * size, request.cacheable) <= size

    def remember(self, request: Request, index: int) -> None:
        """Offer one page, whose key is known."""
        pool = self._pool
        page = request.place.pages[index - request.place.first_page]
        if pool.register(page, request.place.keys[index]) and pool.log.is_on:
            tokens = request.tokens[index * pool.page_size : (index + 1) * pool.page_size]
            pool.log.stored(request.place.keys, index, tokens, request.asked.root)

    def withdraw(self, request: Request) -> None:
        """Withdraw promises of pages that `request` will not compute soon."""
        for key in request.place.keys[request.place.registered :]:
            if self.promises.get(key) is request:
                del self.promises[key]


def root_of(version: AdapterVersion | None, sharing: str | None) -> bytes:
    """Return the first link of the prefix hash chain: the digest of the adapter, and the value that sharers share."""
    return repr((None if version is None else version.digest, sharing)).encode()
