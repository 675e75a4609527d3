"""`Admission`: which waiting requests may start now, and with which pages; gives no row and plans nothing.

Next to read: roster.py, which moves those that may start.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from headrace.engine.scheduling.pages import PagePool
from headrace.engine.scheduling.policy import Policy
from headrace.engine.scheduling.prefix import Prefixes
from headrace.engine.scheduling.request import Request
from headrace.engine.scheduling.roster import Roster

__all__ = ["Admission"]


class Admission:
    """Looks for room for those that wait, in the order of a policy."""

    def __init__(self, roster: Roster, pool: PagePool, prefixes: Prefixes, policy: Policy) -> None:
        """Look through `roster` for requests and in `pool` for pages."""
        self._roster = roster
        self._pool = pool
        self._prefixes = prefixes
        self._policy = policy
        self._max_rows = len(roster.free_rows)

    def candidates(self, step: int, now: float) -> Iterator[tuple[Request, list[int]]]:
        """Requests that may start in `step`, first come those to serve first, with the pages of their prefix.

        Each must have been started, or left waiting for good, before the next is asked for. Paused requests are
        preempted where their rows or pages are needed.
        """
        looked_past = 0
        if not self._row_is_free(now):
            return
        for request in self._roster.waiting.in_order(now):
            if looked_past > self._max_rows or not self._row_is_free(now):
                return
            pages = self._prefixes.find(request, step)
            if pages is None:  # another computes its prefix: waiting is cheaper than computing it twice
                looked_past += 1
                continue
            pages = self._find_room(request, pages, step, now)
            if pages is None:
                return
            yield request, pages

    def _row_is_free(self, now: float) -> bool:
        if not self._roster.free_rows and not self._roster.draining:
            self._preempt_paused(now)
        return bool(self._roster.free_rows)

    def _preempt_paused(self, now: float) -> bool:
        """Preempt the last paused request that holds a row; True if its row and pages came back at once."""
        holders = self._roster.paused_holders()
        if not holders:
            return False
        return self._roster.preempt(max(holders, key=lambda request: self._policy.standing(request, now)))

    def _find_room(self, request: Request, pages: list[int], step: int, now: float) -> list[int] | None:
        """The pages `request` may start with once it fits, preempting paused requests; None if it does not fit now."""
        found: list[int] | None = pages
        while found is not None and not self._fits(request, found):
            if self._roster.draining or not self._preempt_paused(now):
                return None
            found = self._prefixes.find(request, step)  # the paused request may have held them
        return found

    def _fits(self, request: Request, pages: Sequence[int]) -> bool:
        """Whether all known tokens of `request` find room, and one more page for every running request."""
        size = self._pool.page_size
        needed = -(-request.known // size) - len(pages)
        if len(pages) * size > len(request.tokens) - 1:
            needed += 1  # the last page is shared and only partly filled: it is copied when it is written
        refs = self._pool.refs
        needed += sum(1 for page in pages if refs[page] == 0)  # available now, but about to be held
        return needed + len(self._roster.running) <= self._pool.available
