"""`Commits` applies the results of finished steps: it accepts tokens, and ends or fails requests; it plans nothing.

Nearly all requests gain a token in `_accept_tokens` and are looked at no further. Next to read: at_commit.py, what the
other ones do.
"""

from __future__ import annotations

from collections.abc import Sequence

from headrace.engine.errors import NonFiniteLogits, NoTokenLeft, RequestFailed
from headrace.engine.scheduling.memory.pages import PagePool
from headrace.engine.scheduling.memory.prefix import Prefixes
from headrace.engine.scheduling.order.pace import Pace
from headrace.engine.scheduling.plan import Committed, Emission, StepPlan
from headrace.engine.scheduling.request import Request, State
from headrace.engine.scheduling.result import Chosen, NoToken, StepPart, StepResult
from headrace.engine.scheduling.roster import Roster
from headrace.engine.scheduling.shaping import Report
from headrace.engine.scheduling.speculation.runs import accept_runs, counts_of, repeated, runs_of, true_part
from headrace.engine.scheduling.suspension import Suspension

__all__ = ["Commits"]


class Commits:
    """Acceptance of step results for one scheduler."""

    def __init__(
        self,
        roster: Roster,
        suspension: Suspension,
        pool: PagePool,
        prefixes: Prefixes,
        pace: Pace,
        vocab_size: int,
    ) -> None:
        """Start before the first step; an id from `vocab_size` on is a defect of the device."""
        self.step = -1
        """Number of the step that is being committed."""
        self.takes_forced = False
        """Whether computing the tokens that grammars force in this step at once saves time."""
        self._emissions: list[Emission] = []
        self._roster = roster
        self._suspension = suspension
        self._pool = pool
        self._prefixes = prefixes
        self._pace = pace
        self._vocab_size = vocab_size

    def commit(self, plan: StepPlan, result: StepResult) -> Committed:
        """Apply the result of a finished step; see `Scheduler.commit`."""
        if plan.depth:
            return self._commit_runs(plan, result)
        full, others = _accept_tokens(plan, result, self._vocab_size, self._pool.page_size)
        for request in full:
            self._prefixes.offer(request)
        return self._commit_others(plan, result, others) if others else Committed(plan.decodes, result.ids, [])

    def supply(self, request: Request, step: int, chosen: Chosen | RequestFailed) -> list[Emission]:
        """Accept the host's choice of a token after `step`, or its failure; ignore it if no longer awaited."""
        if request.awaited != step or request.state is State.FINISHED:
            return []
        request.awaited = -1
        if isinstance(chosen, RequestFailed):
            return [self._roster.fail(request, chosen)]
        token, report = chosen
        request.unsent = 1
        self.gain(request, token, report)
        return self._new_emissions()

    # -- what requests do with their parts of a step (`Committing`) -------------------------------------------------

    def advance(self, request: Request, end: int) -> None:
        """Count the tokens before position `end` as computed, and offer their full pages to others."""
        request.computed = end
        self._prefixes.offer(request)

    def gain(
        self, request: Request, token: int | NoToken, report: Report | None = None, *, may_end: bool = True
    ) -> None:
        """Append a new token, and end the request if it is the last; fail the request if there is no token."""
        if isinstance(token, NoToken) or not 0 <= token < self._vocab_size:
            self._fail(request, token)
            return
        request.tokens.append(token)
        if token in request.stop_ids:
            self._roster.finish(request, "stop")
        elif may_end and len(request.tokens) >= request.limit:
            self._roster.finish(request, "length")
        self._emissions.append(Emission(request, token, request.finish_reason, report=report))

    def finish(self, request: Request, pooled: object) -> None:
        """End a pooled request with its result."""
        self._roster.finish(request, "stop")
        self._emissions.append(Emission(request, None, request.finish_reason, pooled=pooled))

    def pause(self, request: Request) -> None:
        """Stop planning `request`."""
        self._suspension.pause(request)

    # -- inside -----------------------------------------------------------------------------------------------------

    def _commit_others(self, plan: StepPlan, result: StepResult, others: set[Request]) -> Committed:
        """Commit the work items of `others`, and return what the whole step means."""
        self._begin(plan, result)
        gained: list[Request] = []
        tokens: list[int] = []
        for index, (request, start, count, samples) in enumerate(plan.shares()):
            if request not in others:
                gained.append(request)
                tokens.append(result.ids[index])
                continue
            token = result.instead.get(index, result.ids[index])
            part = StepPart(index, start, start + count, samples, token, index, result)
            if request.asked.speculates and index < len(plan.decodes):
                part = true_part(request, part, index, token)
            self._commit_one(request, part)
        return Committed(gained, tokens, self._new_emissions())

    def _commit_runs(self, plan: StepPlan, result: StepResult) -> Committed:
        """Commit a step that verified drafts, so that a decode has one new token or several."""
        counts = counts_of(plan, result)
        full, others = accept_runs(plan, result, counts, self._vocab_size, self._pool.page_size)
        gained = zip(plan.decodes, counts, strict=False)
        self._roster.charge((request, count - 1) for request, count in gained if request not in others)
        for request in full:
            self._prefixes.offer(request)
        if others:
            return self._commit_other_runs(plan, result, counts, others)
        return Committed(repeated(plan.decodes, counts), result.ids, [])

    def _commit_other_runs(
        self, plan: StepPlan, result: StepResult, counts: Sequence[int], others: set[Request]
    ) -> Committed:
        """Commit the work items of `others`, and return what the whole step means."""
        self._begin(plan, result)
        gained: list[Request] = []
        tokens: list[int] = []
        runs = zip(plan.shares(), runs_of(result.ids, counts), strict=True)
        for index, ((request, start, count, samples), (place, ids)) in enumerate(runs):
            if request not in others:
                gained += [request] * len(ids)
                tokens += ids
                continue
            part = StepPart(index, start, start + count, samples, result.instead.get(place, ids[0]), place, result)
            if index < len(plan.decodes):
                self._commit_run(request, part, plan.drafts[index], ids)
            else:
                self._commit_one(request, part)
        return Committed(gained, tokens, self._new_emissions())

    def _commit_run(self, request: Request, part: StepPart, drafts: int, ids: Sequence[int]) -> None:
        """Commit a decode one token after the other, until its request ends."""
        if not request.asked.speculates or request.discard:
            self._commit_one(request, part)
            return
        last = part.place + len(ids) - 1
        latest = part.result.instead.get(last, ids[-1])
        if not _has_ended(request):
            request.settle(drafts, len(ids))
            self._roster.charge([(request, max(0, len(ids) - 1 - isinstance(latest, NoToken)))])
        for place, token in enumerate(ids[:-1], part.place):
            if not _has_ended(request):
                self._take(request, true_part(request, part, place, token))
        self._commit_one(request, true_part(request, part, last, latest))

    def _begin(self, plan: StepPlan, result: StepResult) -> None:
        """Take note of the step that is committed."""
        self.step = plan.step
        forced = sum(map(len, result.forced.values()))
        self.takes_forced = forced > 0 and self._pace.is_worth(forced, plan.size)

    def _take(self, request: Request, part: StepPart) -> None:
        """Give a request that has not ended its part of a step."""
        if request.at_commit is not None:
            request.at_commit.apply(request, part, self)
        else:
            self.advance(request, part.end)
            if part.samples:
                self.gain(request, part.token)

    def _commit_one(self, request: Request, part: StepPart) -> None:
        request.in_flight -= 1
        if request.discard:
            request.discard -= 1
        elif request.state is State.FINISHED:
            if part.samples and part.token is NoToken.LATE:
                request.go_back(part.end)  # steps in flight skip the row: pages that they were to write are not kept
        else:
            self._take(request, part)
        if not request.in_flight and request.row >= 0:
            if request.state is State.FINISHED:
                self._roster.release_drained(request)
            elif request.leaving:
                self._suspension.requeue_drained(request)

    def _fail(self, request: Request, token: int | NoToken) -> None:
        """Fail a request that was given no token, or an id outside the vocabulary."""
        if token is NoToken.NON_FINITE:
            for page in request.place.pages:  # any request that reads these pages would fail in the same way
                self._pool.forget(page)
        self._emissions.append(self._roster.fail(request, _failure(request, token, self._vocab_size)))

    def _new_emissions(self) -> list[Emission]:
        """Return the emissions since the last call."""
        emissions = self._emissions
        self._emissions = []
        return emissions


def _accept_tokens(
    plan: StepPlan, result: StepResult, vocab_size: int, page_size: int
) -> tuple[list[Request], set[Request]]:
    """Append the tokens of a finished step to those of its decodes for which `Request.plain_until` allows it.

    Args:
        plan: The plan of the step.
        result: The result of the step.
        vocab_size: Size of the vocabulary; an id outside it is a defect of the device.
        page_size: Tokens in a page.

    Returns:
        Requests among these decodes whose latest page is now full, and the requests of all other work items, which
        were given nothing.

    Raises:
        ValueError: The runner did not return one token for each work item, which is a defect of the runner.
    """
    ids = result.ids
    if len(ids) != plan.size or result.counts is not None:
        raise ValueError(f"{len(ids)} tokens for {plan.size} works")
    for index in result.instead:
        if index < len(plan.decodes):
            plan.decodes[index].plain_until = 0
    full: list[Request] = []
    others = {work.request for work in plan.others}
    for request, start, token in zip(plan.decodes, plan.starts, ids, strict=False):
        if start < request.plain_until and 0 <= token < vocab_size and token not in request.stop_ids:
            request.in_flight -= 1
            request.computed = end = len(request.tokens)
            request.tokens.append(token)
            if not end % page_size:
                full.append(request)
        else:
            others.add(request)
    return full, others


def _has_ended(request: Request) -> bool:
    return request.state is State.FINISHED


def _failure(request: Request, token: int | NoToken, vocab_size: int) -> RequestFailed:
    if token is NoToken.NON_FINITE:
        return NonFiniteLogits("the logits of this request were not finite")
    if token is NoToken.NOTHING_LEFT:
        field = None if request.asked.grammar is None else "response_format"
        made = len(request.tokens) - request.prompt_len
        what = "the masks of this request" if field is None else f"{field}: it and the masks of this request"
        return NoTokenLeft(f"{what} leave no token to choose after {made} tokens", field=field)
    return RequestFailed(f"the device sampled token {token} of a vocabulary of {vocab_size}")
