"""`FirstCome`, the policy of an engine that was asked for no other: whoever comes first is served first.

Next to read: policy.py, which says what each method is asked; waiting.py, the queue in that order.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from typing import Any

from headrace.engine.scheduling.order.pace import Pace
from headrace.engine.scheduling.plan import Work
from headrace.engine.scheduling.request import Request

__all__ = ["FirstCome"]


class FirstCome:
    """First come, first served within a priority. Later requests are preempted first, so the first always goes on."""

    def lane(self, request: Request) -> Hashable:
        """Return the same lane for all requests."""
        return None

    def place(self, request: Request) -> Any:
        """Order by priority, then by arrival."""
        return request.order

    def urgency(self, request: Request, now: float) -> Any:
        """Order as within the only lane."""
        return request.order

    def standing(self, request: Request, now: float) -> Any:
        """Order as in the queue."""
        return request.order

    def overtakes(self, waiting: Request, prefilling: Request, now: float) -> bool:
        """Let a prompt that has begun go on."""
        return False

    def worthwhile(self, request: Request, now: float, pace: Pace) -> bool:
        """Serve each request until its deadline has passed."""
        return True

    def expected_wait(self, request: Request, tokens: int, pace: Pace) -> float:
        """Expect no wait."""
        return 0.0

    def displaced(self, running: Sequence[Request], coming: int) -> Iterable[Request]:
        """Preempt no request for its row."""
        return ()

    def is_ahead(self, request: Request) -> bool:
        """Let no request leave the last rows to others."""
        return False

    def arrived(self, request: Request) -> None:
        """Remember nothing."""

    def started(self, request: Request) -> None:
        """Remember nothing."""

    def served(self, works: Iterable[Work]) -> None:
        """Remember nothing."""

    def ended(self, request: Request) -> None:
        """Remember nothing."""
