"""Counts what the requests of a scheduler hold, for statistics and tests; changes nothing."""

from __future__ import annotations

from headrace.engine.scheduling.roster import Roster

__all__ = ["live_tokens", "num_swapped"]


def num_swapped(roster: Roster) -> int:
    """Return the number of waiting or paused requests whose pages are in host memory."""
    return sum(1 for request in roster.requests.values() if request.place.host_places)


def live_tokens(roster: Roster) -> int:
    """Return the number of distinct tokens whose keys and values requests hold, shared pages once."""
    size = roster.capacity.page_size
    filled: dict[int, int] = {}
    for request in roster.requests.values():
        for index, page in enumerate(request.place.pages, request.place.first_page):
            filled[page] = max(filled.get(page, 0), min(size, request.sure - index * size))
    return sum(filled.values())
