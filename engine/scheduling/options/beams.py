"""`BeamSearch` decides which sequences a beam search keeps and when it ends, by their scores; it never runs a model.

The rules are those of transformers' `generate(num_beams=...)`, so that both find the same sequences.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, TypeAlias

from headrace.engine.events import FinishReason

__all__ = ["Beam", "BeamSearch", "EarlyStopping", "Hypothesis"]

EarlyStopping: TypeAlias = bool | Literal["never"]


class Beam(NamedTuple):
    """A sequence that still grows."""

    parent: int
    """Index of the beam that this one continues, among the beams before the last `advance`."""
    tokens: list[int]
    """Tokens of the completion."""
    score: float
    """Sum of the log-probabilities of its tokens."""


class Hypothesis(NamedTuple):
    """A sequence that has ended."""

    score: float
    """Sum of the log-probabilities, divided by the length to the power of the length penalty."""
    tokens: list[int]
    finish_reason: FinishReason


@dataclass
class BeamSearch:
    """State of one beam search: its growing beams and its finished hypotheses."""

    width: int
    length_penalty: float
    early_stopping: EarlyStopping
    stop_ids: frozenset[int]
    limit: int
    """Length in tokens at which every sequence ends; may change from one `advance` to the next."""

    def __post_init__(self) -> None:
        """Begin with the empty sequence."""
        self.beams = [Beam(0, [], 0.0)]
        """Best growing sequences, best first; empty once the search is over."""
        self.finished: list[Hypothesis] = []
        """Best finished sequences, best first, at most `width`."""

    @property
    def candidates(self) -> int:
        """Number of continuations to look at: enough that `width` remain if all stop tokens come first."""
        return max(2, 1 + len(self.stop_ids)) * self.width

    def advance(self, likeliest: Sequence[Sequence[tuple[int, float]]]) -> None:
        """Extend the beams by one token.

        Args:
            likeliest: For each beam, its `candidates` likeliest next tokens with their log-probabilities.
        """
        found = [
            (-beam.score - logprob, parent, token)
            for parent, (beam, tokens) in enumerate(zip(self.beams, likeliest, strict=True))
            for token, logprob in tokens
        ]
        length = len(self.beams[0].tokens) + 1
        beams: list[Beam] = []
        for place, (cost, parent, token) in enumerate(heapq.nsmallest(self.candidates, found)):
            stops = token in self.stop_ids
            ends = stops or length >= self.limit
            if place >= self.width if ends else len(beams) == self.width:
                continue  # this candidate is only needed if better ones end
            tokens = [*self.beams[parent].tokens, token]
            if ends:
                score = self._score(-cost, length)
                self.finished.append(Hypothesis(score, tokens, "stop" if stops else "length"))
            else:
                beams.append(Beam(parent, tokens, -cost))
        self.finished.sort(key=lambda hypothesis: -hypothesis.score)
        del self.finished[self.width :]
        self.beams = beams
        if self.beams and self._is_settled(length):
            self.beams = []

    def _is_settled(self, length: int) -> bool:
        """Return whether no beam is expected to end better than the worst finished hypothesis."""
        if len(self.finished) < self.width:
            return False
        if self.early_stopping is True:
            return True
        if self.early_stopping == "never" and self.length_penalty > 0.0:
            length = self.limit
        return self._score(self.beams[0].score, length) <= self.finished[-1].score

    def _score(self, total: float, length: int) -> float:
        return total / float(length**self.length_penalty)
