"""Steps of their own for deterministic requests: which one is next, and how much of it; owns nothing but the turn.

What such a request computes has shapes that follow from its tokens alone: its prompt in chunks that begin at multiples
of `CHUNK`, then one token a step, also where tokens that it had are computed again after a preemption. So no other
request, no budget and no page of the cache has a say in the last bits of its logits. Next to read: scheduler.py.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from headrace.engine.scheduling.decoding import plan_decodes, plan_tokens
from headrace.engine.scheduling.memory.growth import Growth
from headrace.engine.scheduling.plan import StepPlan
from headrace.engine.scheduling.request import Request

__all__ = ["CHUNK", "Turns"]

CHUNK: Final = 256
"""Tokens, if a step may have so many."""


class Turns:
    """Lets steps of one request and of all others take turns while there are both."""

    def __init__(self, max_batched_tokens: int) -> None:
        """Start without such requests.

        Args:
            max_batched_tokens: Tokens in one step.
        """
        self._chunk = min(CHUNK, max_batched_tokens)
        self.any = False
        """Whether some request that has not ended may compute alone."""
        self.is_due = False
        """Whether the next step is for one of them, if one can go on."""

    def arrived(self, request: Request) -> None:
        """Take note of a request."""
        self.any |= request.alone

    def planned(self, plan: StepPlan, requests: Iterable[Request]) -> None:
        """Take note of a step, and of the requests that have not ended."""
        self.any = self.any and any(each.alone for each in requests)
        self.is_due = self.any and not plan.alone

    def plan_first(self, plan: StepPlan, request: Request, growth: Growth, now: float) -> None:
        """Plan the first step of a request with a new row, which gets all its pages, so that no chunk falls short."""
        growth.grow(plan, request, request.known - request.planned, now)
        plan_tokens(plan, request, self._most(request), growth, now)

    def plan_next(self, plan: StepPlan, running: Iterable[Request], growth: Growth, page_size: int, now: float) -> None:
        """Plan a step of the one among `running` that has been longest without one, or of the next that can go on."""
        for request in sorted((each for each in running if each.alone), key=lambda each: each.latest_step):
            if request.plannable and plan_decodes(plan, [request], growth, page_size, now):
                plan_tokens(plan, request, self._most(request), growth, now)
            if plan.size:
                return

    def together(self, running: list[Request]) -> list[Request]:
        """Return the requests of `running` that may share a step."""
        return [each for each in running if not each.alone] if self.any else running

    def _most(self, request: Request) -> int:
        """Tokens that the next step of `request` computes, of those that it owes."""
        start = request.planned
        return min(self._chunk - start % self._chunk, request.prompt_len - start) if start < request.prompt_len else 1
