"""`Overview`: what may be asked of a scheduler between its changes; changes nothing itself.

Next to read: scheduler.py.
"""

from __future__ import annotations

from headrace.engine.scheduling.request import Request
from headrace.engine.scheduling.roster import Roster

__all__ = ["Overview"]


class Overview:
    """The books of one scheduler, to be read."""

    def __init__(self, roster: Roster) -> None:
        """Look into `roster`."""
        self._roster = roster

    @property
    def requests(self) -> dict[int, Request]:
        """Every request that still holds something or waits, by its id."""
        return self._roster.requests

    @property
    def preemptions(self) -> int:
        """Number of times that a request lost its row and pages to another."""
        return self._roster.preemptions

    @property
    def num_swapped(self) -> int:
        """Requests, waiting or paused, whose pages the host keeps."""
        return sum(1 for request in self._roster.requests.values() if request.places)

    @property
    def num_waiting(self) -> int:
        """Requests that hold neither row nor pages and are not paused."""
        return len(self._roster.waiting)

    @property
    def num_running(self) -> int:
        """Requests that are planned."""
        return len(self._roster.running)

    @property
    def num_paused(self) -> int:
        """Requests whose reader is behind."""
        return len(self._roster.paused)

    def live_tokens(self) -> int:
        """Distinct tokens whose keys and values requests hold now; a page that several share counts once."""
        return self._roster.live_tokens()

    def check(self) -> None:
        """Assert every invariant of requests, rows and pages (invariants.py lists them).

        Raises:
            AssertionError: One does not hold: a defect of headrace.
        """
        self._roster.check()
