"""What some requests do with a committed step besides gaining a token, one small class for each such option.

A request has the `AtCommit` that its options ask for, made of these; a plain request has none, and passes none of this.
Next to read: commit.py.
"""

from __future__ import annotations

from headrace.engine.scheduling.asked import Asked
from headrace.engine.scheduling.options.committing import AtCommit, Committing
from headrace.engine.scheduling.request import Request, State
from headrace.engine.scheduling.result import NoToken, StepPart

__all__ = ["at_commit_of"]


class _GainToken:
    """Gains one token: what a plain request does, for others to build on."""

    every_step = False

    def apply(self, request: Request, part: StepPart, commit: Committing[Request]) -> None:
        """Append the new token, if there is one."""
        commit.advance(request, part.end)
        if part.samples:
            commit.gain(request, part.token, part.report)


class _HoldAtLimit:
    """Pauses at the limit with all pages, as the beams of a search do, so that others can fork the pages."""

    every_step = True

    def apply(self, request: Request, part: StepPart, commit: Committing[Request]) -> None:
        """Append the new token, and pause if it is the last."""
        commit.advance(request, part.end)
        if not part.samples:
            return
        commit.gain(request, part.token, part.report, may_end=False)
        if request.state is not State.FINISHED and len(request.tokens) >= request.limit:
            commit.pause(request)


class _AwaitHost:
    """Awaits the token that the host chooses, where a hook has a say in it; `Commits.supply` accepts it later."""

    every_step = True

    def apply(self, request: Request, part: StepPart, commit: Committing[Request]) -> None:
        """Note the step after which the token is chosen; a device may also have failed to give logits."""
        if part.samples and part.token is NoToken.CHOSEN_LATER:
            commit.advance(request, part.end)
            request.awaited = commit.step
        else:
            _GAIN_TOKEN.apply(request, part, commit)


class _AcceptForced:
    """Accepts the tokens that a grammar forces after a sampled one at once, if computing them together saves time."""

    every_step = True

    def apply(self, request: Request, part: StepPart, commit: Committing[Request]) -> None:
        """Append the new token and the forced ones, up to the request's end.

        Steps launched ahead sample the first of these as well; their result is known when they are committed.
        """
        commit.advance(request, part.end)
        if not part.samples:
            return
        if part.end < len(request.tokens):
            if part.token != request.tokens[part.end]:
                commit.gain(request, part.token if isinstance(part.token, NoToken) else NoToken.NOTHING_LEFT)
            return
        forced = part.result.forced.get(part.place, ())
        commit.gain(request, part.token, part.report)
        for token in forced if commit.takes_forced else ():
            if request.state is not State.FINISHED:
                commit.gain(request, token)
        ahead = max(0, len(request.tokens) - request.known)  # how far they pass what the device samples
        request.unsent += ahead
        request.known += ahead


class _EndPooled:
    """Ends a pooled request with its result once all of its tokens are computed; nothing is sampled."""

    every_step = True

    def apply(self, request: Request, part: StepPart, commit: Committing[Request]) -> None:
        """End the request if this was its last chunk, with an error if the result is not finite."""
        commit.advance(request, part.end)
        if request.computed < request.prompt_len:
            return
        if part.token is NoToken.NON_FINITE:
            commit.gain(request, part.token)
        else:
            commit.finish(request, part.result.pooled.get(part.item))


class _GoBackIfLate:
    """Goes back a token if the mask of the request's grammar was late, and otherwise does as `then` does."""

    def __init__(self, then: AtCommit[Request]) -> None:
        self._then = then
        self.every_step = then.every_step

    def apply(self, request: Request, part: StepPart, commit: Committing[Request]) -> None:
        """Take back what was planned on top of the token that was not chosen, if it was not."""
        if part.samples and part.token is NoToken.LATE:
            request.go_back(part.end)
        else:
            self._then.apply(request, part, commit)


class _Report:
    """Passes on the log-probabilities of a request that wants them, and otherwise does as `then` does."""

    every_step = True

    def __init__(self, then: AtCommit[Request]) -> None:
        self._then = then

    def apply(self, request: Request, part: StepPart, commit: Committing[Request]) -> None:
        """Keep reports on prompt tokens, and hand on the report on the new token.

        Reports known from before a preemption stay.
        """
        if found := part.result.prompt_reports.get(part.item):
            request.prompt_reports += found[len(request.prompt_reports) - part.start :]
        self._then.apply(request, part._replace(report=part.result.reports.get(part.place)), commit)


_GAIN_TOKEN = _GainToken()


def at_commit_of(asked: Asked) -> AtCommit[Request] | None:
    """Return what a request does with a committed step; None if it gains a token and nothing else."""
    if asked.pooling is not None:
        return _EndPooled()
    found: AtCommit[Request] | None = None
    if asked.holds:
        found = _HoldAtLimit()
    elif asked.processor is not None:
        found = _AwaitHost()
    elif asked.jumps:
        found = _AcceptForced()
    if asked.grammar is not None and asked.processor is None:
        found = _GoBackIfLate(found or _GAIN_TOKEN)
    if asked.reporting is not None:
        found = _Report(found or _GAIN_TOKEN)
    return found
