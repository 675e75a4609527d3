"""Makes the typed result of a step from what a device left in host memory: ids, and codes in place of some ids.

The only place where codes are read. A step without special rows costs one look at the smallest id.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from torch import Tensor

from headrace.engine.scheduling.result import Choice, NoToken, StepResult
from headrace.engine.scheduling.shaping import Report

__all__ = ["LATE", "NON_FINITE", "NOTHING_LEFT", "step_result"]

NON_FINITE: Final[int] = NoToken.NON_FINITE.value
NOTHING_LEFT: Final[int] = NoToken.NOTHING_LEFT.value
LATE: Final[int] = NoToken.LATE.value

_MEANING: Final = {what.value: what for what in NoToken}


def step_result(
    ids: Sequence[int],
    *,
    has_codes: bool = True,
    reports: Mapping[int, Report] | None = None,
    prompt_reports: Mapping[int, Sequence[Report]] | None = None,
    pooled: Mapping[int, Tensor] | None = None,
    choices: Mapping[int, Choice] | None = None,
    forced: Mapping[int, Sequence[int]] | None = None,
) -> StepResult:
    """Return the result of a step; the other arguments are fields of `StepResult`.

    Args:
        ids: One id for each work item, or a code of `NoToken` in its place.
        has_codes: False if it is known that all of `ids` are ids.
        reports: Reports on new tokens; those of items that have a code are left out.
        prompt_reports: Reports on prompt tokens.
        pooled: Pooled float tensors in host memory, with copies done. Vectors become arrays; the items of those that
            are not finite are `NoToken.NON_FINITE`.
        choices: Calls that choose on the host; their items are `NoToken.CHOSEN_LATER`, whatever their ids are.
        forced: Tokens that grammars force.
    """
    instead: dict[int, NoToken] = {}
    if has_codes and ids and min(ids) < 0:
        instead = {index: _MEANING[code] for index, code in enumerate(ids) if code in _MEANING}
    if not (reports or prompt_reports or pooled or choices or forced):
        return StepResult(ids, instead=instead)
    instead.update(dict.fromkeys(choices or (), NoToken.CHOSEN_LATER))
    return StepResult(
        ids,
        reports={index: report for index, report in (reports or {}).items() if index not in instead},
        prompt_reports=prompt_reports or {},
        pooled=_settled(pooled or {}, instead),
        choices=choices or {},
        forced=forced or {},
        instead=instead,
    )


def _settled(pooled: Mapping[int, Tensor], instead: dict[int, NoToken]) -> dict[int, Any]:
    """Return pooled results, vectors as arrays; `instead` then says which pooled items are not finite, and no more."""
    settled: dict[int, Any] = {}
    for index, value in pooled.items():
        settled[index] = value if value.dim() > 1 else value.numpy().copy()  # another step may use the vector's memory
        instead.pop(index, None)  # a pooled item samples nothing, so its id was another item's
        if value.dim() == 1 and not bool(value.isfinite().all()):
            instead[index] = NoToken.NON_FINITE
    return settled
