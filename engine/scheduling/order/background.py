"""`BackgroundLast` combines two policies, users before background; each tier is ordered by its own policy.

Background is every request of a priority above 0. Its service never counts against the users of its tenant.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from itertools import chain
from typing import Any

from headrace.engine.scheduling.order.pace import Pace
from headrace.engine.scheduling.plan import Work
from headrace.engine.scheduling.policy import Policy
from headrace.engine.scheduling.request import Request

__all__ = ["BackgroundLast"]


class BackgroundLast:
    """Policy that serves background requests only if no user waits, and preempts them before users."""

    def __init__(self, users: Policy, background: Policy) -> None:
        """Order requests of priority 0 and below by `users`, and the others behind them by `background`."""
        self._tiers = users, background
        self._waiting_users: set[int] = set()
        """Ids of user requests that have not started yet."""

    def lane(self, request: Request) -> Hashable:
        """Return the tier of the request, and the lane that the tier's policy gives it."""
        return _tier(request), self._of(request).lane(request)

    def place(self, request: Request) -> Any:
        """Return the place that the tier's policy gives the request."""
        return self._of(request).place(request)

    def urgency(self, request: Request, now: float) -> Any:
        """Return the tier of the request, and its urgency within the tier."""
        return _tier(request), self._of(request).urgency(request, now)

    def standing(self, request: Request, now: float) -> Any:
        """Return the tier and the standing within it, so that all background requests are preempted before any user."""
        return _tier(request), self._of(request).standing(request, now)

    def overtakes(self, waiting: Request, prefilling: Request, now: float) -> bool:
        """Start a user before a prompt of background goes on; ask the tier's policy about two of one tier."""
        if _tier(waiting) != _tier(prefilling):
            return _tier(waiting) < _tier(prefilling)
        return self._of(waiting).overtakes(waiting, prefilling, now)

    def worthwhile(self, request: Request, now: float, pace: Pace) -> bool:
        """Return what the tier's policy says."""
        return self._of(request).worthwhile(request, now, pace)

    def expected_wait(self, request: Request, tokens: int, pace: Pace) -> float:
        """Return the wait in seconds that the tier's policy expects; users who arrive later do not count."""
        return self._of(request).expected_wait(request, tokens, pace)

    def displaced(self, running: Sequence[Request], coming: int) -> Iterable[Request]:
        """Return the latest background requests if users outnumber coming rows, then what the users' policy returns."""
        users, background = self._tiers
        tiers: tuple[list[Request], list[Request]] = [], []
        for request in running:
            tiers[_tier(request)].append(request)
        if self._waiting_users:
            given_up = reversed(tiers[1]) if len(self._waiting_users) > coming else ()
            return chain(given_up, users.displaced(tiers[0], coming))
        return background.displaced(tiers[1], coming)

    def is_ahead(self, request: Request) -> bool:
        """Return what the tier's policy says."""
        return self._of(request).is_ahead(request)

    def arrived(self, request: Request) -> None:
        """Tell the tier's policy that the request waits."""
        if _tier(request) == 0:
            self._waiting_users.add(request.id)
        self._of(request).arrived(request)

    def started(self, request: Request) -> None:
        """Tell the tier's policy that the request has started."""
        self._waiting_users.discard(request.id)
        self._of(request).started(request)

    def served(self, works: Iterable[Work]) -> None:
        """Pass the work items of each tier's requests to its policy."""
        tiers: tuple[list[Work], list[Work]] = [], []
        for work in works:
            tiers[_tier(work.request)].append(work)
        for policy, part in zip(self._tiers, tiers, strict=True):
            policy.served(part)

    def ended(self, request: Request) -> None:
        """Tell the tier's policy that the request has ended."""
        self._waiting_users.discard(request.id)
        self._of(request).ended(request)

    def _of(self, request: Request) -> Policy:
        return self._tiers[_tier(request)]


def _tier(request: Request) -> int:
    return int(request.asked.priority > 0)
