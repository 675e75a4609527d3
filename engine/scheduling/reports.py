"""Takes what a finished step tells beside its tokens to the requests that want it; other steps never come here."""

from __future__ import annotations

from collections.abc import Sequence

from headrace.engine.scheduling.plan import Emission, StepPlan
from headrace.engine.scheduling.request import State
from headrace.engine.scheduling.shaping import ReportedTokens

__all__ = ["take_prompt_reports", "with_reports"]


def take_prompt_reports(plan: StepPlan, tokens: ReportedTokens) -> None:
    """Keep what a step that is about to be committed says of prompts."""
    for index, reports in tokens.prompts.items():
        work = plan.works[index]
        if not work.request.discard and work.request.state is not State.FINISHED:
            work.request.take_prompt_reports(work.start, reports)


def with_reports(plan: StepPlan, tokens: ReportedTokens, emissions: Sequence[Emission]) -> list[Emission]:
    """The emissions of a step, each with what the step says of its token, or what came of its hidden states."""
    works = plan.works
    reports = {works[index].request.id: report for index, report in tokens.chosen.items()}
    pooled = {works[index].request.id: value for index, value in tokens.pooled.items()}
    return [
        emission._replace(report=reports.get(emission.request.id), pooled=pooled.get(emission.request.id))
        for emission in emissions
    ]
