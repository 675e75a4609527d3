"""`Prefixes`: which pages already hold the start of a request, or soon will; never allocates or releases a page.

Full pages are offered under a hash of everything before and in them; where a turn of a conversation ended, the last
page, too, however full it is. A page that a running request is about to fill is
promised: whoever has the same prefix waits for it instead of computing it again.
"""

from __future__ import annotations

from headrace.engine.scheduling.memory.pages import PagePool
from headrace.engine.scheduling.request import Request, State

__all__ = ["Prefixes"]


class Prefixes:
    """Prefix sharing between the requests of one scheduler."""

    def __init__(self, pool: PagePool, *, enabled: bool) -> None:
        """Share nothing yet; with `enabled` False only the choices of one prompt share pages."""
        self.promises: dict[bytes, Request] = {}
        """Hash of a page that is not full yet -> the running request that will fill it."""
        self._pool = pool
        self.enabled = enabled

    def find(self, request: Request, step: int) -> list[int] | None:
        """Pages that `step` may read and that hold the start of a waiting `request`; None if it should wait."""
        size = self._pool.page_size
        leader = request.leader
        if leader is not None and not (request.preemptions or request.alone or leader.failed):
            needed = len(request.tokens) - 1
            if leader.copied == step:
                return None
            if leader.pages and not leader.discard and leader.launched_before(step) >= needed:
                request.found = needed
                return leader.pages[: -(-needed // size)]
            if leader.state is State.WAITING or (leader.state is State.RUNNING and not leader.leaving):
                return None
        request.found = 0
        before = request.before
        if before is not None and before.row >= 0:
            return None  # its last launched steps are about to end
        usable = self.usable(request)
        pages = self._pool.match(usable)
        request.found = len(pages) * size
        if request.places:  # the host has the rest
            return pages
        if len(pages) < len(usable) and usable[len(pages)] in self.promises:
            return None
        if before is not None and self.enabled:
            pages += self._rest(request, before.computed)
        return pages

    def usable(self, request: Request) -> list[bytes]:
        """Hashes of the full pages that `request` may take from others."""
        if not self.enabled:
            return []
        self._pool.extend_keys(request.keys, request.tokens, request.root)
        return request.keys[: request.cacheable // self._pool.page_size]

    def _rest(self, request: Request, count: int) -> list[int]:
        """The page that holds the last of the first `count` tokens of `request` and is only partly full, if it may be
        used and the pages before it were found."""
        full = count // self._pool.page_size
        if request.found != full * self._pool.page_size or not request.found < count <= request.cacheable:
            return []
        key = self._pool.key_of_rest(request.keys[:full], request.tokens[:count], request.root)
        pages = self._pool.match([key])
        if pages:
            request.found = count
        return pages

    def keep(self, request: Request) -> None:
        """Keep the pages of a request that has ended, and of which nothing is in flight, for what goes on after it."""
        ended_itself = request.tokens[-1] in request.stop_ids  # a device may leave out what is planned behind that
        request.computed = min(request.planned, len(request.tokens) - ended_itself)
        if not self.enabled:
            return
        self.offer(request)
        self._pool.extend_keys(request.keys, request.tokens, request.root)
        full, rest = divmod(request.computed, self._pool.page_size)
        request.kept = request.keys[:full]
        if rest:
            key = self._pool.key_of_rest(request.kept, request.tokens[: request.computed], request.root)
            self._pool.register_rest(request.pages[full], key)
            request.kept.append(key)
        self._pool.keep(request.kept)

    def let_go(self, request: Request) -> None:
        """One keeper less; without any, the pages of `request` are cached like all others."""
        request.keepers -= 1
        if request.keepers <= 0:
            self._pool.unkeep(request.kept)
            request.kept = []

    def promise(self, request: Request) -> None:
        """Announce the full pages that `request` is about to compute."""
        for key in request.keys[request.registered :]:
            self.promises.setdefault(key, request)

    def offer(self, request: Request) -> None:
        """Offer the pages of `request` that are full, planned and known to whoever has the same prefix.

        Where a step may turn out to have left the row alone, as with a grammar, those that are computed.
        """
        if not self.enabled:
            return
        reached = request.planned if request.grammar is None else request.computed
        full = min(reached, len(request.tokens)) // self._pool.page_size
        if request.registered >= full:
            return
        self._pool.extend_keys(request.keys, request.tokens, request.root)
        for index in range(request.registered, full):
            key = request.keys[index]
            self.remember(request, index)
            if self.promises.get(key) is request:
                del self.promises[key]
        request.registered = full

    def keeps(self, request: Request) -> bool:
        """Whether a running `request` that loses its row finds all but its last page again while there is room."""
        size = self._pool.page_size
        return request.planned - min(request.registered * size, request.cacheable) <= size

    def remember(self, request: Request, index: int) -> None:
        """Offer one page, whose key is known."""
        pool = self._pool
        if pool.register(request.pages[index], request.keys[index]) and pool.log.is_on:
            tokens = request.tokens[index * pool.page_size : (index + 1) * pool.page_size]
            pool.log.stored(request.keys, index, tokens, request.root)

    def withdraw(self, request: Request) -> None:
        """Stop others from waiting for pages that `request` will not compute soon."""
        for key in request.keys[request.registered :]:
            if self.promises.get(key) is request:
                del self.promises[key]
