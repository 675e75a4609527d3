"""Ends choices where their caller wants it: at stop strings, or where the hook `stop_when` says so.

`WatchedGeneration` is the generation of a request that has either; the text of its tokens is made as they are
delivered, and not when they are read.
"""

from __future__ import annotations

from collections.abc import Sequence
from collections.abc import Set as AbstractSet

from headrace.engine.delivery.generation import Control, Delivered, Generation, TokenMaker, detokenizer_of
from headrace.engine.errors import HookFailed
from headrace.engine.events import FinishReason, Token
from headrace.engine.params import SamplingParams
from headrace.engine.scheduling.plan import Emission
from headrace.engine.scheduling.request import Request
from headrace.engine.steps.hooks import StopWhen, asks_to_stop
from headrace.engine.tokens.stop_matcher import StopMatcher
from headrace.engine.tokens.text import Detokenizer
from headrace.engine.tokens.token_table import TokenTable

__all__ = ["StopText", "StopWatch", "WatchedGeneration", "stop_texts"]


class StopText:
    """Text of one choice that may be cut by a stop string."""

    __slots__ = ("_detokenizer", "_matcher", "_stop_ids", "_unwatched")

    def __init__(
        self,
        detokenizer: Detokenizer,
        stops: tuple[str, ...],
        stop_ids: AbstractSet[int],
        include: bool = False,
        min_tokens: int = 0,
    ) -> None:
        """Watch for `stops` in the text after the first `min_tokens` tokens; ids in `stop_ids` end a choice.

        Stop strings and stop tokens are shown only with `include`.
        """
        self._unwatched = min_tokens
        self._detokenizer = detokenizer
        self._matcher = StopMatcher(stops, include)
        self._stop_ids = frozenset() if include else stop_ids

    def feed(self, token: int | None, *, last: bool) -> tuple[str, bool]:
        """Return the text to show after `token`, and whether a stop string was met; `last` releases held text."""
        text = "" if token is None or token in self._stop_ids else self._detokenizer.feed(token)
        if token is not None and self._unwatched:
            self._unwatched -= 1
            return text + (self._detokenizer.flush() if last else ""), False
        shown, matched = self._matcher.feed(text)
        if last and not matched:
            rest, matched = self._matcher.feed(self._detokenizer.flush())
            shown += rest
            if not matched:
                shown += self._matcher.flush()
                matched = self._matcher.matched
        return shown, matched

    @property
    def stop(self) -> str | None:
        """The stop string that was met."""
        return self._matcher.stop


class StopWatch:
    """The `stop_when` hook of one stream, which sees its tokens before their reader does."""

    def __init__(self, stop_when: StopWhen, maker: TokenMaker, seconds: float) -> None:
        """Call `stop_when` with the tokens that `maker` makes; each call may take `seconds`."""
        self.maker = maker
        self._stop_when = stop_when
        self._seconds = seconds

    def stops(self, token: Token) -> bool:
        """Return whether the choice of `token` ends there.

        Raises:
            HookFailed: The hook raised, took too long or returned no bool.
        """
        return asks_to_stop(self._stop_when, token, self._seconds)


def stop_texts(table: TokenTable, params: SamplingParams, stop_ids: AbstractSet[int]) -> list[StopText]:
    """Return the stop-string state of each choice, or none without stop strings; `stop_ids` end a choice too."""
    if not params.stop:
        return []
    include = params.include_stop_str_in_output
    return [
        StopText(detokenizer_of(table, params), params.stop, stop_ids, include, params.min_tokens)
        for _ in range(params.n)
    ]


class WatchedGeneration(Generation):
    """All choices of a request with stop strings, a `stop_when` hook, or both."""

    def __init__(
        self, control: Control, choices: int, window: int, stop_texts: Sequence[StopText], watch: StopWatch | None
    ) -> None:
        """Start before admission; other arguments are those of `Generation`.

        Args:
            control: The step loop.
            choices: Number of choices.
            window: Unread tokens after which the choices pause.
            stop_texts: Stop-string state of each choice; empty if there are no stop strings.
            watch: The caller's `stop_when` hook, if there is one.
        """
        super().__init__(control, choices, window)
        self._stop_texts = stop_texts
        self._watch = watch
        self._seen = [0] * choices
        """Number of tokens of each choice that were delivered."""
        self._stopped: set[int] = set()
        """Ids of requests that had ended in another way before their text was found to be complete."""

    def skip(self, ids: Sequence[int]) -> None:
        """Look for stop strings after the first tokens of the only choice, which have been shown."""
        for token in ids:
            for stop_text in self._stop_texts:
                stop_text.feed(token, last=False)

    def deliver_token(self, request: Request, token: int) -> None:
        """Put a token where the reader finds it; its choice may end with it."""
        self.deliver(Emission(request, token, None))

    def deliver(self, emission: Emission) -> None:
        """Put a commit's result where the reader finds it, and end its choice if the caller wants that."""
        if self.finished or emission.request.id in self._stopped:
            return
        if emission.error is not None:
            self.fail(emission.error)
            return
        choice, reason = self._choice_of[emission.request.id], emission.finish_reason
        self._seen[choice] += emission.token is not None
        text = stop = None
        if self._stop_texts:
            text, matched = self._stop_texts[choice].feed(emission.token, last=reason is not None)
            if matched:
                reason, stop = self._stop(emission.request), self._stop_texts[choice].stop
        item = Delivered(choice, emission.token, text, reason, emission.report, stop)
        if self._watch is None:
            unread = self.mailbox.put(item)
        else:
            token = self._watch.maker.make(item)
            unread = self.mailbox.put(
                item._replace(token=token)
            )  # before it is looked at: the hook may cancel the stream
            if reason is None:
                reason = self._asked(self._watch, token, emission.request)
        if reason is not None:
            self._count_end()
        else:
            self._await_reader(unread)

    def _stop(self, request: Request) -> FinishReason:
        """End a choice whose text is complete, even if its deadline passed or a later step failed meanwhile."""
        own = request.virtual_tokens + len(self.prompt)
        del request.tokens[own + self._seen[self._choice_of[request.id]] :]  # several may have come in one step
        if not self._control.finish(request, "stop"):
            self._stopped.add(request.id)  # another end of the choice is on its way
        return "stop"

    def _asked(self, watch: StopWatch, token: Token, request: Request) -> FinishReason | None:
        """Ask the caller's hook about `token`; return "stop" if the hook ends the choice."""
        try:
            stops = watch.stops(token)
        except HookFailed as error:
            self.fail(error)
            return None
        if not stops or request.finish_reason == "cancelled":  # by the hook itself
            return None
        self._stop(request)
        text = self._stop_texts[token.index].feed(None, last=True)[0] if self._stop_texts else None
        token.text += watch.maker.flush(token.index) if text is None else text
        token.finish_reason = "stop"
        return "stop"

    def _end_cancelled(self, choice: int, text: str | None = None) -> None:
        if self._stop_texts:
            text, _ = self._stop_texts[choice].feed(None, last=True)
        super()._end_cancelled(choice, text)
