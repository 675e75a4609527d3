"""Passes log-probabilities, pooled results and forced tokens of a step to the requests that want them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from headrace.engine.errors import NonFiniteLogits, NoTokenLeft, RequestFailed
from headrace.engine.scheduling.order.pace import Pace
from headrace.engine.scheduling.plan import Emission, Outcome, StepPlan
from headrace.engine.scheduling.request import Request, State
from headrace.engine.scheduling.result import NoToken, StepResult

__all__ = ["accept_run", "failure_of", "forced_runs", "take_prompt_reports", "with_reports"]


def take_prompt_reports(plan: StepPlan, result: StepResult) -> None:
    """Keep the prompt log-probabilities of a step that is about to be committed."""
    for index, reports in result.prompt_reports.items():
        work = plan.works[index]
        if not work.request.discard and work.request.state is not State.FINISHED:
            work.request.take_prompt_reports(work.start, reports)


def with_reports(plan: StepPlan, result: StepResult, outcome: Outcome) -> Outcome:
    """Return the outcome of a step with the report on each token, or with the result of pooling."""
    works = plan.works
    reports = {works[index].request.id: report for index, report in result.reports.items()}
    pooled = {works[index].request.id: value for index, value in result.pooled.items()}
    emissions = [
        emission._replace(report=reports.get(emission.request.id), pooled=pooled.get(emission.request.id))
        for emission in outcome.each()
    ]
    return Outcome((), (), emissions)


def forced_runs(plan: StepPlan, result: StepResult, pace: Pace) -> dict[int, Sequence[int]]:
    """Return the tokens that grammars force after those of a step, by request id, if worth computing at once."""
    if not result.forced or not pace.is_worth(sum(map(len, result.forced.values())), plan.size):
        return {}
    return {plan.works[index].request.id: run for index, run in result.forced.items()}


def accept_run(
    request: Request,
    place: int,
    token: int | NoToken,
    forced: Sequence[int],
    accept: Callable[[Request, int | NoToken], Emission],
) -> list[Emission]:
    """Accept a sampled token and the tokens that a grammar forces after it, up to the request's end.

    Steps launched ahead sample the first of these as well; their result is known when they are committed.

    Args:
        request: A request with `jumps`.
        place: Position of the sampled token.
        token: The sampled token, or what happened in its place.
        forced: Tokens that must follow.
        accept: Accepts one token.
    """
    if place < len(request.tokens):
        if token == request.tokens[place]:
            return []
        return [accept(request, token if isinstance(token, NoToken) else NoToken.NOTHING_LEFT)]
    run: tuple[int | NoToken, ...] = (token, *forced)
    emissions = [accept(request, each) for each in run if request.state is not State.FINISHED]
    ahead = max(0, len(request.tokens) - request.known)  # how far they pass what the device samples
    request.unsent += ahead
    request.known += ahead
    return emissions


def failure_of(request: Request, token: int | NoToken, vocab_size: int) -> RequestFailed:
    """Return the error of `request`, which was given no token, or an id outside the vocabulary."""
    if token is NoToken.NON_FINITE:
        return NonFiniteLogits("the logits of this request were not finite")
    if token is NoToken.NOTHING_LEFT:
        field = None if request.grammar is None else "response_format"
        made = len(request.tokens) - request.prompt_len
        what = "the masks of this request" if field is None else f"{field}: it and the masks of this request"
        return NoTokenLeft(f"{what} leave no token to choose after {made} tokens", field=field)
    return RequestFailed(f"the device sampled token {token} of a vocabulary of {vocab_size}")
