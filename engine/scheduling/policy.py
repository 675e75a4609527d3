"""`Policy` defines who is served next and who is preempted; it decides order alone and never touches rows or pages.

A policy is pure: it knows what the scheduler tells it, and is given the time as a value. Next to read:
order/first_come.py, the default of an engine; the others are in policies.py.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from typing import Any, Protocol, runtime_checkable

from headrace.engine.scheduling.order.first_come import FirstCome
from headrace.engine.scheduling.order.pace import Pace
from headrace.engine.scheduling.plan import Work
from headrace.engine.scheduling.request import Request

__all__ = ["FirstCome", "Policy"]


@runtime_checkable
class Policy(Protocol):
    """The order of service. One policy serves one engine, since it may remember who was served.

    Waiting requests queue in lanes. Within a lane the order is fixed when a request arrives. Which lane's first request
    comes next is asked each time, so it may depend on the time and on who was served. A queue of a thousand therefore
    never needs to be sorted.

    Keys are any values that compare with `<`; lower comes first. `now` is in seconds, on the clock of
    `Request.arrived` and `Asked.deadline`. Derive from `FirstCome` to change only some methods.
    """

    def lane(self, request: Request) -> Hashable:
        """Return the lane in which `request` waits, which must not change while the request lives."""
        ...

    def place(self, request: Request) -> Any:
        """Return the key of `request` within its lane, which must not change while the request lives."""
        ...

    def urgency(self, request: Request, now: float) -> Any:
        """Return the key of a lane whose first request is `request`; called only if several lanes wait."""
        ...

    def standing(self, request: Request, now: float) -> Any:
        """Return the key of a request that holds a row: prefills go on in this order; the largest is preempted first.

        If the key changes with time, the policy must ensure that no request is preempted for ever.
        """
        ...

    def overtakes(self, waiting: Request, prefilling: Request, now: float) -> bool:
        """Return whether a waiting request starts before the prompt of one that holds a row goes on."""
        ...

    def worthwhile(self, request: Request, now: float, pace: Pace) -> bool:
        """Return whether the waiting `request` can still meet its deadline; if not, it ends with `deadline`."""
        ...

    def expected_wait(self, request: Request, tokens: int, pace: Pace) -> float:
        """Return the seconds until the prompt of a new request with a deadline begins; late ones are rejected.

        Args:
            request: The new request, which is not queued yet.
            tokens: Known tokens of the requests that wait in its lane and come before it.
            pace: Measured step times.
        """
        ...

    def displaced(self, running: Sequence[Request], coming: int) -> Iterable[Request]:
        """Return requests that may lose their row to waiting ones, in order of preemption; called if few rows are free.

        A preempted request waits again and goes on from its pages, which the prefix cache keeps: it loses few tokens.

        Args:
            running: All requests that hold a row, in the order of `Request.order`.
            coming: Rows that are free or about to be freed.
        """
        ...

    def is_ahead(self, request: Request) -> bool:
        """Return whether `request`, and any request after it, leaves the last free rows to others for now.

        It waits until the step computes prompts in any case, or more than one row in 64 is free.
        """
        ...

    def arrived(self, request: Request) -> None:
        """Take note that `request` begins to wait for the first time."""
        ...

    def started(self, request: Request) -> None:
        """Take note that `request` was given a row and owes `known - planned` tokens."""
        ...

    def served(self, works: Iterable[Work]) -> None:
        """Take note of the work items of a planned step, or of the further tokens that right drafts gave a request.

        The latter come at the commit, as one work item of one token for each.
        """
        ...

    def ended(self, request: Request) -> None:
        """Take note that `request` has ended."""
        ...
