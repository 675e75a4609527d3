"""`Overview`: a read-only view of a scheduler's requests and counters.

Next to read: scheduler.py.
"""

from __future__ import annotations

from headrace.engine.scheduling.request import Request
from headrace.engine.scheduling.roster import Roster

__all__ = ["Overview"]


class Overview:
    """A read-only view of the requests of one scheduler."""

    def __init__(self, roster: Roster) -> None:
        """Read from `roster`."""
        self._roster = roster

    @property
    def requests(self) -> dict[int, Request]:
        """Every request that waits or still holds a row or pages, by its id."""
        return self._roster.requests

    @property
    def preemptions(self) -> int:
        """Number of times that a request lost its row and pages to another request."""
        return self._roster.preemptions

    @property
    def num_swapped(self) -> int:
        """Number of waiting or paused requests whose pages are in host memory."""
        return sum(1 for request in self._roster.requests.values() if request.places)

    @property
    def num_waiting(self) -> int:
        """Number of requests that hold neither row nor pages and are not paused."""
        return len(self._roster.waiting)

    @property
    def num_running(self) -> int:
        """Number of requests that are being planned."""
        return len(self._roster.running)

    @property
    def num_paused(self) -> int:
        """Number of requests that are paused because their reader is behind."""
        return len(self._roster.paused)

    def live_tokens(self) -> int:
        """Number of distinct tokens whose keys and values requests hold; a page that several share counts once."""
        return self._roster.live_tokens()

    def check(self) -> None:
        """Assert every invariant of requests, rows and pages (invariants.py lists them).

        Raises:
            AssertionError: An invariant does not hold, which is a defect of headrace.
        """
        self._roster.check()
