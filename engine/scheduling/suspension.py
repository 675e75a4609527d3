"""`Suspension` pauses and preempts requests, and lets them go on; it never decides when.

Next to read: roster.py, whose books it keeps; planner.py and admission.py, which preempt for pages and rows.
"""

from __future__ import annotations

from bisect import insort

from headrace.engine.scheduling.memory.prefix import Prefixes
from headrace.engine.scheduling.memory.swaps import Swaps
from headrace.engine.scheduling.policy import Policy
from headrace.engine.scheduling.request import Request, State
from headrace.engine.scheduling.roster import Roster, service_order

__all__ = ["Suspension"]


class Suspension:
    """Pausing and preempting the requests of one roster."""

    def __init__(self, roster: Roster, prefixes: Prefixes, swaps: Swaps, policy: Policy) -> None:
        """Suspend nothing yet.

        Args:
            roster: The requests.
            prefixes: Promises of pages, which a suspended request does not keep.
            swaps: Stores the pages of a preempted request if that is worthwhile.
            policy: Order of service; the last is preempted first.
        """
        self._roster = roster
        self._prefixes = prefixes
        self._swaps = swaps
        self._policy = policy

    def pause(self, request: Request) -> None:
        """Stop planning `request`; do nothing if it is paused or has ended."""
        if request.state is State.WAITING:
            self._roster.waiting.remove(request)
        elif request.state is State.RUNNING:
            if not request.leaving:
                self._roster.running.remove(request)
            self._prefixes.withdraw(request)
        else:
            return
        request.state = State.PAUSED
        self._roster.paused.append(request)

    def resume(self, request: Request) -> None:
        """Undo `pause`; do nothing in any other state."""
        if request.state is not State.PAUSED:
            return
        self._roster.paused.remove(request)
        if request.row < 0:
            request.state = State.WAITING
            self._roster.waiting.add(request)
            return
        request.state = State.RUNNING
        if not request.leaving:
            insort(self._roster.running, request, key=service_order)
            self._prefixes.promise(request)

    def paused_holders(self) -> list[Request]:
        """Return the paused requests that hold a row and are not being preempted."""
        return [request for request in self._roster.paused if request.row >= 0 and not request.leaving]

    def last(self) -> Request:
        """Return the last in order of the paused requests that hold a row, or, without any, of the running ones."""
        return self._last_of(self.paused_holders() or self._roster.running)

    def preempt_paused(self) -> bool:
        """Preempt the last paused request that holds a row; return whether its row and pages were released at once."""
        holders = self.paused_holders()
        return bool(holders) and self.preempt(self._last_of(holders))

    def preempt(self, victim: Request) -> bool:
        """Send `victim` back to wait, now or at its last commit; return True if now."""
        self._roster.preemptions += 1
        victim.preemptions += 1
        victim.plain_until = 0
        self._prefixes.withdraw(victim)
        if victim.state is State.RUNNING:
            self._roster.running.remove(victim)
        if victim.in_flight:
            victim.leaving = True
            self._roster.draining += 1
            return False
        self._requeue(victim)
        return True

    def requeue_drained(self, request: Request) -> None:
        """Queue a preempted request again, when its last launched step has been committed."""
        self._roster.draining -= 1
        self._requeue(request)

    def _requeue(self, request: Request) -> None:
        """Release the row and pages of a preempted request, swapping out pages if worthwhile, and queue it again."""
        self._swaps.put_out(request)
        self._roster.give_back(request)
        request.leaving = False
        request.place.is_tainted = False
        request.awaited = -1
        request.unsent = 0
        request.is_held = False
        request.known = len(request.tokens)
        request.planned = 0
        request.computed = 0
        request.ready = 0
        request.reach = 0
        request.place.registered = 0
        if request.state is State.RUNNING:
            request.state = State.WAITING
            self._roster.waiting.add(request)

    def _last_of(self, requests: list[Request]) -> Request:
        return max(requests, key=lambda request: self._policy.standing(request, self._roster.now))
