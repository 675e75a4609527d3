"""`Policy`: who is served next and who gives way; decides order alone, never touches a row, a page or a queue.

A policy is pure: it knows what the scheduler tells it, and the time is a value that it is given. `FirstCome` is what an
engine uses unless told otherwise; the others are in policies.py. Next to read: waiting.py, the queue in that order.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from typing import Any, Protocol, runtime_checkable

from headrace.engine.scheduling.order.pace import Pace
from headrace.engine.scheduling.plan import Work
from headrace.engine.scheduling.request import Request

__all__ = ["FirstCome", "Policy"]


@runtime_checkable
class Policy(Protocol):
    """The order of service. One policy serves one engine, since it may remember who was served.

    Waiting requests queue in lanes. Within a lane the order is fixed when a request arrives; which lane's first request
    comes next is asked anew each time, so that it may depend on the time and on who was served. A queue of a thousand
    therefore never needs to be sorted.

    Keys are whatever compares with `<`; lower comes first. `now` is in seconds, on the clock of `Request.arrived` and
    `Request.deadline`. Derive from `FirstCome` to change only some of it.
    """

    def lane(self, request: Request) -> Hashable:
        """Which lane `request` waits in; the same for as long as the request lives."""
        ...

    def place(self, request: Request) -> Any:
        """Key of `request` within its lane; the same for as long as the request lives."""
        ...

    def urgency(self, request: Request, now: float) -> Any:
        """Key of a lane whose first request is `request`; asked only where several lanes wait."""
        ...

    def standing(self, request: Request, now: float) -> Any:
        """Key of a request that holds a row: prefills go on in this order, and the largest gives way first.

        Where it changes with time, the policy must see to it that no request gives way for ever.
        """
        ...

    def overtakes(self, waiting: Request, prefilling: Request, now: float) -> bool:
        """Whether a waiting request starts before the prompt of one that holds a row goes on."""
        ...

    def worthwhile(self, request: Request, now: float, pace: Pace) -> bool:
        """Whether `request`, which waits and has a deadline, can still meet it; if not, it ends with `deadline`."""
        ...

    def expected_wait(self, request: Request, tokens: int, pace: Pace) -> float:
        """Seconds before the prompt of a new request with a deadline is begun; those that cannot meet it are refused.

        Args:
            request: It is not queued yet.
            tokens: Known ones of those that wait in its lane and come before it.
            pace: What steps take.
        """
        ...

    def displaced(self, running: Sequence[Request], coming: int) -> Iterable[Request]:
        """Requests that may lose their row to those that wait, in the order in which they do; asked where none is free.

        They wait again, and go on from their pages, which the prefix cache keeps: what one loses is a few tokens.

        Args:
            running: All that hold a row, in the order of `Request.order`.
            coming: Rows that are about to come free, by this or otherwise.
        """
        ...

    def is_ahead(self, request: Request) -> bool:
        """Whether `request`, and whoever comes after it, leaves the last free rows to others as long as it can.

        That is until the step computes prompts in any case, or more than one row in 64 is free.
        """
        ...

    def arrived(self, request: Request) -> None:
        """`request` begins to wait for the first time."""
        ...

    def started(self, request: Request) -> None:
        """`request` has got a row; it owes `known - planned` tokens."""
        ...

    def served(self, works: Iterable[Work]) -> None:
        """A step was planned."""
        ...

    def ended(self, request: Request) -> None:
        """`request` waits and runs no more."""
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
        """Order within the one lane."""
        return request.order

    def standing(self, request: Request, now: float) -> Any:
        """Order as in the queue."""
        return request.order

    def overtakes(self, waiting: Request, prefilling: Request, now: float) -> bool:
        """A prompt that is begun goes on."""
        return False

    def worthwhile(self, request: Request, now: float, pace: Pace) -> bool:
        """Serve each request until its deadline has passed."""
        return True

    def expected_wait(self, request: Request, tokens: int, pace: Pace) -> float:
        """Expect no wait, as none is foreseen."""
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
