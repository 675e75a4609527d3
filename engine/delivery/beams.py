"""`BeamGeneration`: drives a beam search over the scheduler's requests; never scores a sequence or plans a step.

Each beam is a request for one token that then holds its pages. The beams of the next round fork these pages
copy-on-write; once they have their own tokens, the old beams are released.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from headrace.engine.delivery.generation import Control, Delivered, Generation
from headrace.engine.events import Usage
from headrace.engine.scheduling.options.beams import BeamSearch
from headrace.engine.scheduling.options.forks import goes_on
from headrace.engine.scheduling.plan import Emission
from headrace.engine.scheduling.request import Request

__all__ = ["BeamGeneration"]


class BeamControl(Control, Protocol):
    """The operations that a beam search may ask of the step loop."""

    def add(self, generation: Generation, requests: Sequence[Request]) -> None:
        """Queue more requests of a generation that runs."""
        ...

    @property
    def most_tokens(self) -> int:
        """Most tokens of prompt and completion that a request may have, with the memory of this moment."""
        ...


class BeamGeneration(Generation):
    """One caller's beam search; the reader gets the best sequences when the search is over."""

    def __init__(self, control: BeamControl, search: BeamSearch, choices: int) -> None:
        """Start before admission.

        Args:
            control: The step loop.
            search: A search that has just begun.
            choices: Number of sequences to return.
        """
        super().__init__(control, choices, window=0)
        self._loop = control
        self._search = search
        self._most = search.limit
        self._prompt_len = 0
        self._choices = choices
        self._held: Sequence[Request] = ()
        """Beams of the previous round, whose pages the current ones fork."""
        self._beams: Sequence[Request] = ()
        self._likeliest: dict[int, Sequence[tuple[int, float]]] = {}

    def start(self, prompt: list[int], requests: Sequence[Request]) -> None:
        """Take in the first beam, which the scheduler has accepted."""
        self._prompt_len = requests[0].prompt_len  # virtual tokens of an adapter take room, too
        self._beams = requests
        super().start(prompt, requests)

    @property
    def usage(self) -> Usage:
        """Tokens of the sequences that are returned."""
        tokens = sum(len(each.tokens) for each in self._search.finished[: self._choices]) if self.finished else 0
        return self._usage(tokens)

    def deliver(self, emission: Emission) -> None:
        """Take in the continuations of one beam; the last beam's begin the next round."""
        if emission.error is not None or emission.report is None:
            super().deliver(emission)
            return
        self._likeliest[emission.request.id] = emission.report.top
        if len(self._likeliest) == len(self._beams):
            self._search.limit = min(self._most, self._loop.most_tokens - self._prompt_len)  # the pool may change size
            self._search.advance([self._likeliest[request.id] for request in self._beams])
            self._likeliest.clear()
            self._begin_round()

    def cancel(self) -> None:
        """End the search, unless it has ended."""
        if not self.finished:
            for choice in range(self._choices):
                self._end_cancelled(choice)
            self._let_go(self.requests)
            self.admitted.set()

    def _begin_round(self) -> None:
        self._let_go(self._held)
        self._held = self._beams
        self._beams = [goes_on(self._held[beam.parent], beam.tokens[-1]) for beam in self._search.beams]
        self.requests = [*self._held, *self._beams]
        if self._beams:
            self._loop.add(self, self._beams)
        else:
            self._let_go(self._held)
            self._deliver_best()

    def _let_go(self, requests: Sequence[Request]) -> None:
        for request in requests:
            self._control.finish(request, "length")

    def _deliver_best(self) -> None:
        for choice in range(self._choices):
            hypothesis = self._search.finished[choice]
            for token in hypothesis.tokens[:-1]:
                self.mailbox.put(Delivered(choice, token, None, None))
            last, reason = hypothesis.tokens[-1], hypothesis.finish_reason
            self.mailbox.put(Delivered(choice, last, None, reason, score=hypothesis.score))
            self._count_end()
