"""What requests with options do at a commit, and what they may do there: the two protocols between them and commit.py.

A plain request has no `AtCommit`. Next to read: at_commit.py, which has one for each option.
"""

from __future__ import annotations

from typing import Protocol, TypeVar

from headrace.engine.scheduling.result import NoToken, StepPart
from headrace.engine.scheduling.shaping import Report

__all__ = ["AtCommit", "Committing"]

_R = TypeVar("_R")
_R_contra = TypeVar("_R_contra", contravariant=True)  # stands for `Request`, which names these protocols itself


class Committing(Protocol[_R_contra]):
    """What a request may do with its part of a step that is being committed."""

    step: int
    """Number of the step."""
    takes_forced: bool
    """Whether computing the tokens that grammars force in this step at once saves time."""

    def advance(self, request: _R_contra, end: int) -> None:
        """Count the tokens before position `end` as computed, and offer their full pages to others."""
        ...

    def gain(
        self, request: _R_contra, token: int | NoToken, report: Report | None = None, *, may_end: bool = True
    ) -> None:
        """Append a new token, and end the request if it is the last; fail the request if there is no token.

        Args:
            request: A request that has not ended.
            token: The token, or what happened in its place.
            report: Report on the token.
            may_end: Whether reaching the limit ends the request.
        """
        ...

    def finish(self, request: _R_contra, pooled: object) -> None:
        """End a pooled request with its result."""
        ...

    def pause(self, request: _R_contra) -> None:
        """Stop planning `request`."""
        ...


class AtCommit(Protocol[_R]):
    """What a request does with a committed step where it does more than gain one token; a plain request has none.

    Chosen once, when the request is submitted (at_commit.py).
    """

    every_step: bool
    """Whether `apply` is called for every step; if not, only for those that the usual loops cannot commit."""

    def apply(self, request: _R, part: StepPart, commit: Committing[_R]) -> None:
        """Take in what a step gave `request`, which has not ended."""
        ...
