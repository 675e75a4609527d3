"""`Alternation` decides which deterministic request computes next in a step of its own, and how much of it.

The shapes of such a request's steps follow from its tokens alone: its prompt is computed in chunks that begin at
multiples of `CHUNK`, then one token a step, even if tokens are computed again after a preemption. So no other request,
no budget and no cached page affects the last bits of its logits. Next to read: scheduler.py.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from headrace.engine.scheduling.decoding import plan_decodes, plan_tokens
from headrace.engine.scheduling.memory.growth import Growth
from headrace.engine.scheduling.plan import StepPlan
from headrace.engine.scheduling.request import Request

__all__ = ["CHUNK", "Alternation"]

CHUNK: Final = 256
"""Tokens in a chunk of the prompt of a deterministic request, if a step may hold as many."""


class Alternation:
    """Alternation between steps of one deterministic request and steps of all other requests."""

    def __init__(self, max_batched_tokens: int) -> None:
        """Start without deterministic requests.

        Args:
            max_batched_tokens: Largest number of tokens in one step.
        """
        self._chunk = min(CHUNK, max_batched_tokens)
        self.any = False
        """Whether some request that has not ended computes alone. Only then are the methods called."""
        self.is_due = False
        """Whether the next step is for a request that computes alone, if one can go on."""

    def planned(self, plan: StepPlan, requests: Iterable[Request]) -> None:
        """Take note of a planned step, and of the requests that have not ended."""
        self.any = any(each.asked.alone for each in requests)
        self.is_due = self.any and not plan.alone

    def plan_first(self, plan: StepPlan, request: Request, growth: Growth, now: float) -> None:
        """Plan the first step of a request with a new row, which is given all its pages so that no chunk is cut."""
        growth.grow(plan, request, request.known - request.planned, now)
        plan_tokens(plan, request, self._most(request), growth, now)

    def plan_next(self, plan: StepPlan, running: Iterable[Request], growth: Growth, page_size: int, now: float) -> None:
        """Plan a step of the request in `running` whose last step is longest ago, or of the next that can go on."""
        for request in sorted((each for each in running if each.asked.alone), key=lambda each: each.latest_step):
            if request.is_plannable and plan_decodes(plan, [request], growth, page_size, now):
                plan_tokens(plan, request, self._most(request), growth, now)
            if plan.size:
                return

    def together(self, running: list[Request]) -> list[Request]:
        """Return the requests of `running` that may share a step."""
        return [each for each in running if not each.asked.alone]

    def _most(self, request: Request) -> int:
        """Return the number of owed tokens that the next step of `request` computes."""
        start = request.planned
        return min(self._chunk - start % self._chunk, request.prompt_len - start) if start < request.prompt_len else 1
