"""`Prefixes` finds pages that hold the start of a request or soon will; it never allocates or releases a page.

Full pages are offered under a hash of all tokens before and in them; when a turn of a conversation has ended, so is its
last page, however full it is. A page that a running request is about to fill is promised: requests with the same prefix
wait for it instead of computing it again.
"""

from __future__ import annotations

from headrace.engine.scheduling.memory.pages import PagePool
from headrace.engine.scheduling.memory.window import Window
from headrace.engine.scheduling.request import Request, State

__all__ = ["Prefixes"]


class Prefixes:
    """Prefix sharing between the requests of one scheduler."""

    def __init__(self, pool: PagePool, window: Window, *, enabled: bool) -> None:
        """Share nothing yet; with `enabled` False only the choices of one prompt share pages."""
        self._window = window
        self.promises: dict[bytes, Request] = {}
        """Hash of a page that is not full yet -> the running request that will fill it."""
        self._pool = pool
        self.enabled = enabled

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
        request.place.first_page, pages = self._pool.match_last(usable, self._window)
        end = request.place.first_page + len(pages)
        request.place.found = end * size
        if end < len(usable) and usable[end] in self.promises:
            return None
        if before is not None and self.enabled:
            pages += self._rest(request, before.computed)
        return pages

    def usable(self, request: Request) -> list[bytes]:
        """Return the hashes of the full pages that `request` may share."""
        if not self.enabled:
            return []
        self._pool.extend_keys(request.place.keys, request.tokens, request.asked.root)
        return request.place.keys[: request.cacheable // self._pool.page_size]

    def _rest(self, request: Request, count: int) -> list[int]:
        """Return the partly full page with the last of the first `count` tokens of `request`, as a list.

        The list is empty if that page may not be shared, or the pages before it were not found.
        """
        full = count // self._pool.page_size
        if request.place.found != full * self._pool.page_size or not request.place.found < count <= request.cacheable:
            return []
        key = self._pool.key_of_rest(request.place.keys[:full], request.tokens[:count], request.asked.root)
        pages = self._pool.match([key])
        if pages:
            request.place.found = count
        return pages

    def keep(self, request: Request) -> None:
        """Keep the pages of an ended request, which has nothing in flight, for the next turn of the conversation."""
        ended_itself = request.tokens[-1] in request.stop_ids  # a device may skip tokens planned after a stop token
        request.computed = min(request.planned, len(request.tokens) - ended_itself)
        if not self.enabled:
            return
        self.offer(request)
        self._pool.extend_keys(request.place.keys, request.tokens, request.asked.root)
        full, rest = divmod(request.computed, self._pool.page_size)
        request.place.kept = request.place.keys[:full]
        if rest:
            key = self._pool.key_of_rest(request.place.kept, request.tokens[: request.computed], request.asked.root)
            self._pool.register_rest(request.place.pages[full - request.place.first_page], key)
            request.place.kept.append(key)
        self._pool.keep(request.place.kept)

    def drop_stream(self, request: Request) -> None:
        """Count one stream fewer that may continue `request`; after the last, its pages are cached like all others."""
        request.streams -= 1
        if request.streams <= 0:
            self._pool.unkeep(request.place.kept)
            request.place.kept = []

    def promise(self, request: Request) -> None:
        """Promise the full pages that `request` is about to compute."""
        for key in request.place.keys[request.place.registered :]:
            self.promises.setdefault(key, request)

    def offer(self, request: Request) -> None:
        """Offer the pages of `request` that are full, planned and of known tokens to requests with the same prefix.

        If a step may skip the row, as with a grammar, only computed pages are offered.
        """
        if not self.enabled:
            return
        reached = request.planned if request.asked.grammar is None else request.computed
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
