"""The depths that steps really run, which the rule of depths is told."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

from simulation.rig import Rig, capacity

from headrace.engine.scheduling.plan import FixedDepths, StepPlan
from headrace.engine.scheduling.result import StepResult
from headrace.engine.scheduling.speculation.counts import Speculation


def drafting(rows: Sequence[int], planned: Sequence[int], depths: Callable[[int], Sequence[int]] | None) -> list[Any]:
    """What the rule is told of a step whose rows had `rows` drafts, of the `planned` ones."""
    told: list[Any] = []
    speculation = Speculation(4, lambda rows, context: 4, depths=depths)
    speculation.rule.observe = lambda *values: told.append(values)  # type: ignore[method-assign]
    plan = StepPlan(0, depth=max(planned), starts=[100] * len(planned), drafts=list(planned))
    plan.decodes = [SimpleNamespace(asked=SimpleNamespace(speculates=True)) for _ in planned]  # type: ignore[misc]
    speculation.observe(plan, StepResult([7] * len(planned), drafted=list(rows)), 0.5)
    return told


def test_the_rule_is_told_of_the_depth_that_ran() -> None:
    assert drafting([3, 0], [3, 1], lambda rows: [1, 2, 4]) == [(2, 100, 8, 0.5)], "there is no graph of depth 3"
    assert drafting([2, 2], [4, 4], lambda rows: [1, 2]) == [(2, 100, 4, 0.5)], "more lines do not fit"
    assert drafting([], [4, 4], lambda rows: [1, 2, 4]) == [(2, 100, 0, 0.5)], "the device had nothing to draft with"
    assert drafting([3, 0], [3, 1], None) == [(2, 100, 3, 0.5)], "others compute what is there"


def test_a_budget_leaves_a_depth_that_the_device_has() -> None:
    for depths, expected in ((None, 3), (lambda rows: [1, 2, 4], 2), (lambda rows: [4], 0)):
        speculation = Speculation(4, lambda rows, context: 4, depths=depths)
        running: Any = [SimpleNamespace(planned=9, asked=SimpleNamespace(speculates=True)) for _ in range(2)]
        assert speculation.depth(running, 2 + 2 * 2 * 3) == expected


def test_a_runner_without_graphs_has_every_depth() -> None:
    assert not isinstance(Rig(capacity(), drafts=2).runner, FixedDepths)
