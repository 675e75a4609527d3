"""`Alternation` decides which deterministic request computes next in a step of its own, and how much of it.

The shapes of such a request's steps follow from its tokens alone: its prompt is computed in chunks that begin at
multiples of `CHUNK`, then one token a step, even if tokens are computed again after a preemption. So no other request,
no budget and no cached page affects the last bits of its logits. Next to read: scheduler.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Final

from headrace.engine.scheduling.admission import Admission
from headrace.engine.scheduling.order.deadlines import DeadlineQueue
from headrace.engine.scheduling.plan import StepPlan
from headrace.engine.scheduling.planner import Planner
from headrace.engine.scheduling.request import Request
from headrace.engine.scheduling.roster import Roster

__all__ = ["CHUNK", "Alternation"]

CHUNK: Final = 256
"""Tokens in a chunk of the prompt of a deterministic request, if a step may hold as many."""


class Alternation:
    """Alternation between steps of one deterministic request and steps of all other requests."""

    def __init__(
        self,
        roster: Roster,
        admission: Admission,
        planner: Planner,
        deadlines: DeadlineQueue,
        max_batched_tokens: int,
    ) -> None:
        """Start without deterministic requests.

        Args:
            roster: The requests.
            admission: Finds room for those that wait.
            planner: Plans what one of them computes.
            deadlines: Ends those that cannot meet their deadline.
            max_batched_tokens: Largest number of tokens in one step.
        """
        self._chunk = min(CHUNK, max_batched_tokens)
        self.any = False
        """Whether some request that has not ended computes alone. Only then are the methods called."""
        self.is_due = False
        """Whether the next step is for a request that computes alone, if one can go on."""
        self._roster = roster
        self._admission = admission
        self._planner = planner
        self._deadlines = deadlines

    def plan(
        self,
        plan: StepPlan,
        now: float,
        together: Callable[[StepPlan], None],
        give_row: Callable[[StepPlan, Request, Sequence[int]], None],
    ) -> None:
        """Plan a step of one request that computes alone, or of all others, whichever is due and can go on.

        Args:
            plan: An empty plan.
            now: Seconds, on the clock of `Request.arrived`.
            together: Plans a step of requests that do not compute alone.
            give_row: Moves a request from the queue to a row that starts with these pages.
        """
        if self.is_due and self._plan_alone(plan, now, give_row):
            return
        together(plan)
        if not plan.size:
            self._plan_alone(plan, now, give_row)

    def planned(self, plan: StepPlan, requests: Iterable[Request]) -> None:
        """Take note of a planned step, and of the requests that have not ended."""
        self.any = any(each.asked.alone for each in requests)
        self.is_due = self.any and not plan.alone

    def together(self, running: list[Request]) -> list[Request]:
        """Return the requests of `running` that may share a step."""
        return [each for each in running if not each.asked.alone]

    def _plan_alone(
        self, plan: StepPlan, now: float, give_row: Callable[[StepPlan, Request, Sequence[int]], None]
    ) -> bool:
        """Plan a step of one request that computes alone, a waiting one first; return whether one could go on."""
        for request, pages in self._admission.candidates(plan, now, alone=True):
            give_row(plan, request, pages)
            self._planner.grow(plan, request, request.known - request.planned)  # all its pages: no chunk is ever cut
            self._planner.plan_tokens(plan, request, self._most(request))
            break
        if self._admission.missed:
            self._deadlines.end_missed(self._admission.missed)
        if not plan.size:
            self._plan_next(plan)
        plan.alone = plan.size == 1
        return plan.alone

    def _plan_next(self, plan: StepPlan) -> None:
        """Plan a step of the running request whose last step is longest ago, or of the next that can go on."""
        alone = [each for each in self._roster.running if each.asked.alone]
        for request in sorted(alone, key=lambda each: each.latest_step):
            if request.is_plannable and self._planner.plan_decodes(plan, [request]):
                self._planner.plan_tokens(plan, request, self._most(request))
            if plan.size:
                return

    def _most(self, request: Request) -> int:
        """Return the number of owed tokens that the next step of `request` computes."""
        start = request.planned
        return min(self._chunk - start % self._chunk, request.prompt_len - start) if start < request.prompt_len else 1
