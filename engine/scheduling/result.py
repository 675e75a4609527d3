"""`StepResult`: what a finished step gives back, in columns over the work items of its plan; it has no behaviour.

The common step is decodes that gained a token each: one list of ids and nothing else. What happened to a few rows, or
what they asked for besides, stands in sparse mappings by the index of the work item. Next to read: commit.py.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from types import MappingProxyType
from typing import Any, NamedTuple, TypeAlias

from headrace.engine.scheduling.shaping import Report

__all__ = ["Choice", "Chosen", "NoToken", "StepPart", "StepResult"]


class NoToken(Enum):
    """What happened to a row in place of a new token.

    The values are the codes that devices write in place of an id into memory of their own.
    """

    NON_FINITE = -1
    """The logits held NaN or infinity."""
    NOTHING_LEFT = -2
    """The masks of the row's options allow no token."""
    CHOSEN_LATER = -3
    """The host has yet to choose the token, by calling an entry of `StepResult.choices`."""
    LATE = -4
    """The mask of the row's grammar was not ready in time. No token was chosen, and the device skips the row until it
    is given tokens, or an empty list, from that position on."""


Chosen: TypeAlias = tuple[int | NoToken, Report | None]
"""New token of a row, or what happened in its place, and the report on the token, if one is wanted."""

Choice: TypeAlias = Callable[[], Chosen]
"""Call that chooses one token on the host and takes as long as the caller's own code; made once, in any thread."""

_NONE: Mapping[int, Any] = MappingProxyType({})


class StepResult(NamedTuple):
    """Result of a step. Every mapping is from the index of a work item of the plan, except for those by place."""

    ids: Sequence[int]
    """New token ids of the work items, in order. The id of an item is arbitrary if the item samples nothing, if
    `instead` has the id's place, or if its row is skipped since it was `NoToken.LATE`."""
    counts: Sequence[int] | None = None
    """Number of ids of each work item, in order, at least one: the items whose drafts were right have more. None if
    each has one."""
    instead: Mapping[int, NoToken] = _NONE
    """What happened in place of a new token, by the id's place in `ids`. Entries of items that sample nothing have no
    meaning, unless the item ends a pooled request. Nothing follows such a place in an item's run."""
    reports: Mapping[int, Report] = _NONE
    """Reports on new tokens, by the id's place in `ids`."""
    prompt_reports: Mapping[int, Sequence[Report]] = _NONE
    """Reports on the prompt tokens from position `start + 1` of the item on."""
    pooled: Mapping[int, Any] = _NONE
    """Results of pooling, of items that end a pooled request: arrays or tensors of the runner."""
    choices: Mapping[int, Choice] = _NONE
    """Calls that choose the tokens that are `NoToken.CHOSEN_LATER`."""
    forced: Mapping[int, Sequence[int]] = _NONE
    """Tokens that a row's grammar forces after its new token, by the token's place in `ids`."""
    drafted: Sequence[int] = ()
    """Number of drafts that were verified for each of the plan's decodes, in order; empty if for none."""
    late_seconds: float = 0.0
    """Part of the time of a step with drafts in which was read, for these, what steps without drafts had computed."""


class StepPart(NamedTuple):
    """What one work item of a step gave its request."""

    item: int
    """Index of the work item."""
    start: int
    """Position of the first computed token."""
    end: int
    """Position behind the last computed token, which is the place of a new token."""
    samples: bool
    """Whether there is a new token."""
    token: int | NoToken
    """The new token, or what happened in its place; arbitrary if `samples` is False."""
    place: int
    """Place of the new token in `StepResult.ids`."""
    result: StepResult
    """Result of the whole step."""
    report: Report | None = None
    """Report on the new token, if the request wants one."""
