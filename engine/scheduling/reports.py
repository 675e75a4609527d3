"""Takes what a finished step tells beside its tokens to the requests that want it; most steps never come here."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from headrace.engine.errors import NonFiniteLogits, NoTokenLeft, RequestFailed
from headrace.engine.scheduling.order.pace import Pace
from headrace.engine.scheduling.plan import NON_FINITE, NOTHING_LEFT, Emission, Outcome, StepPlan
from headrace.engine.scheduling.request import Request, State
from headrace.engine.scheduling.shaping import ReportedTokens

__all__ = ["accept_run", "failure_of", "forced_runs", "take_prompt_reports", "with_reports"]


def take_prompt_reports(plan: StepPlan, tokens: ReportedTokens) -> None:
    """Keep what a step that is about to be committed says of prompts."""
    for index, reports in tokens.prompts.items():
        work = plan.works[index]
        if not work.request.discard and work.request.state is not State.FINISHED:
            work.request.take_prompt_reports(work.start, reports)


def with_reports(plan: StepPlan, tokens: ReportedTokens, outcome: Outcome) -> Outcome:
    """The outcome of a step, each token with what the step says of it, or with what came of hidden states."""
    works = plan.works
    reports = {works[index].request.id: report for index, report in tokens.chosen.items()}
    pooled = {works[index].request.id: value for index, value in tokens.pooled.items()}
    emissions = [
        emission._replace(report=reports.get(emission.request.id), pooled=pooled.get(emission.request.id))
        for emission in outcome.each()
    ]
    return Outcome((), (), emissions)


def forced_runs(plan: StepPlan, tokens: Sequence[int], pace: Pace) -> dict[int, Sequence[int]]:
    """What grammars force behind the tokens of a step, by request, where it is worth computing at once."""
    if not isinstance(tokens, ReportedTokens) or not tokens.forced:
        return {}
    if not pace.is_worth(sum(map(len, tokens.forced.values())), plan.size):
        return {}
    return {plan.works[index].request.id: run for index, run in tokens.forced.items()}


def accept_run(
    request: Request, place: int, token: int, forced: Sequence[int], accept: Callable[[Request, int], Emission]
) -> list[Emission]:
    """Take a sampled token and those that a grammar forces behind it, up to the request's end.

    Steps launched ahead sample the first of these as well: what they give is known when they are committed.

    Args:
        request: One that jumps.
        place: Of the sampled token.
        token: What was sampled.
        forced: What must follow.
        accept: Takes one token.
    """
    if place < len(request.tokens):
        if token == request.tokens[place]:
            return []
        return [accept(request, NON_FINITE if token == NON_FINITE else NOTHING_LEFT)]
    run = (token, *forced)
    emissions = [accept(request, each) for each in run if request.state is not State.FINISHED]
    ahead = max(0, len(request.tokens) - request.known)  # of what the device has sampled, or is about to
    request.unsent += ahead
    request.known += ahead
    return emissions


def failure_of(request: Request, token: int, vocab_size: int) -> RequestFailed:
    """Why `request` fails, which was given `token`, none of the vocabulary."""
    if token == NON_FINITE:
        return NonFiniteLogits("the logits of this request were not finite")
    if token == NOTHING_LEFT:
        field = None if request.grammar is None else "response_format"
        made = len(request.tokens) - request.prompt_len
        what = "the masks of this request" if field is None else f"{field}: it and the masks of this request"
        return NoTokenLeft(f"{what} leave no token to choose after {made} tokens", field=field)
    return RequestFailed(f"the device sampled token {token} of a vocabulary of {vocab_size}")
