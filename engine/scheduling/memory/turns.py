"""`KeptTurns` keeps the pages of a turn of a conversation that has ended, the last one included, for the next turn.

That page is found under a key of just the tokens in it, however full it is. It never allocates or releases a page.
"""

from __future__ import annotations

from collections.abc import Callable

from headrace.engine.scheduling.memory.pages import PagePool
from headrace.engine.scheduling.request import Request

__all__ = ["KeptTurns"]


class KeptTurns:
    """Pages of ended turns in one page pool."""

    def __init__(self, pool: PagePool, offer: Callable[[Request], None], *, enabled: bool) -> None:
        """Keep nothing yet; `offer` offers the full pages of a request, and with `enabled` False nothing is kept."""
        self._pool = pool
        self._offer = offer
        self._enabled = enabled

    def keep(self, request: Request) -> None:
        """Keep the pages of an ended request, which has nothing in flight, for the next turn of the conversation."""
        ended_itself = request.tokens[-1] in request.stop_ids  # a device may skip tokens planned after a stop token
        request.computed = min(request.sure, len(request.tokens) - ended_itself)
        if not self._enabled:
            return
        self._offer(request)
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

    def rest(self, request: Request, count: int) -> list[int]:
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
