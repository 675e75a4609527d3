"""`with_verified`: the result of a step whose rows chose several tokens each; knows no device."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from headrace.engine.scheduling.result import NoToken, StepResult
from headrace.engine.scheduling.shaping import Report

__all__ = ["Verified", "with_verified"]


class Verified(NamedTuple):
    """The tokens that one work chose: its own, and one more for each draft that was right."""

    tokens: list[int]
    """Ids; the last may be a code of `NoToken`."""
    reports: dict[int, Report]
    """Reports by place in `tokens`."""


def with_verified(result: StepResult, verified: Mapping[int, Verified], drafted: Sequence[int]) -> StepResult:
    """Return a result in which the ids of some work items are followed by those that right drafts gave.

    Args:
        result: A result with one id for each work item, the first of those that it chose.
        verified: What the work items that sample chose.
        drafted: Number of drafts that were verified for each of the plan's decodes.
    """
    ids: list[int] = []
    counts: list[int] = []
    instead: dict[int, NoToken] = {}
    forced: dict[int, Sequence[int]] = {}
    reports: dict[int, Report] = {}
    for index, first in enumerate(result.ids):
        place, run = len(ids), [first]
        if index in verified:
            run, told = verified[index]
            reports.update({place + at: report for at, report in told.items() if run[at] >= 0})
        if index in result.instead:
            instead[place] = result.instead[index]
        elif run[-1] < 0:
            instead[place + len(run) - 1] = NoToken(run[-1])
        ids += run
        if index in result.forced:
            forced[len(ids) - 1] = result.forced[index]
        counts.append(len(run))
    return result._replace(ids=ids, counts=counts, instead=instead, forced=forced, reports=reports, drafted=drafted)
