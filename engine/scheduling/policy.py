"""`Policy`: who is served next and who gives way; decides order alone, never touches a row, a page or a queue.

A policy is pure: it knows what the scheduler tells it, and the time is a value that it is given. `FirstCome` is what an
engine uses unless it is told otherwise. Next to read: waiting.py, which keeps the queue in a policy's order.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any, Protocol

from headrace.engine.scheduling.request import Request

__all__ = ["FirstCome", "Policy"]


class Policy(Protocol):
    """The order of service.

    Waiting requests queue in lanes. Within a lane the order is fixed when a request arrives; which lane's first request
    comes next is asked anew each time, so that it may depend on the time and on who was served. A queue of a thousand
    therefore never needs to be sorted.

    Keys are whatever compares with `<`; lower comes first.
    """

    def lane(self, request: Request) -> Hashable:
        """Which lane `request` waits in; the same for as long as the request lives."""
        ...

    def place(self, request: Request) -> Any:
        """Key of `request` within its lane; the same for as long as the request lives."""
        ...

    def urgency(self, request: Request, now: float) -> Any:
        """Key of a lane whose first request is `request`; asked only where several lanes wait.

        Args:
            request: The first of the lane.
            now: Seconds, on the clock of `Request.arrived`.
        """
        ...

    def standing(self, request: Request, now: float) -> Any:
        """Key of a request that holds a row: prefills go on in this order, and the largest gives way first.

        Where it changes with time, the policy must see to it that no request gives way for ever.
        """
        ...


class FirstCome:
    """First come, first served within a priority. Whoever comes later gives way, so the first always gets on."""

    def lane(self, request: Request) -> Hashable:
        """One lane for all."""
        return None

    def place(self, request: Request) -> Any:
        """Priority, then arrival."""
        return request.order

    def urgency(self, request: Request, now: float) -> Any:
        """There is one lane."""
        return 0

    def standing(self, request: Request, now: float) -> Any:
        """As in the queue."""
        return request.order
