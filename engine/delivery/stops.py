"""Finds where a caller wants a choice to end, by stop strings or by the hook `stop_when`; ends nothing itself."""

from __future__ import annotations

from collections.abc import Set as AbstractSet

from headrace.engine.delivery.delivered import TokenMaker, detokenizer_of
from headrace.engine.events import Token
from headrace.engine.params import SamplingParams
from headrace.engine.steps.hooks import StopWhen, asks_to_stop
from headrace.engine.tokens.stop_matcher import StopMatcher
from headrace.engine.tokens.text import Detokenizer, TokenTable

__all__ = ["StopText", "StopWatch", "stop_texts"]


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
    """Return the stop-string state of each choice; ids in `stop_ids` end a choice as well."""
    include = params.include_stop_str_in_output
    return [
        StopText(detokenizer_of(table, params), params.stop, stop_ids, include, params.min_tokens)
        for _ in range(params.n)
    ]
