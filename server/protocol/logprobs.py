"""Log-probabilities as OpenAI's two APIs write them, in step with the text of a choice; asks the engine for none."""

from __future__ import annotations

import codecs
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple

from headrace.engine import Logprob, Token, TokenLogprobs

__all__ = ["Aligned", "Placed", "chat_logprobs", "completion_logprobs"]

_BYTES: Final = "bytes:"
"""Before the escaped bytes of a token that is no whole character, as OpenAI's completions write it."""


class Placed(NamedTuple):
    """A token's log-probabilities and where its text begins in that of its choice."""

    entry: TokenLogprobs | None
    """None for the first token of a prompt, before which nothing stands."""
    token: str
    start: int
    """In characters. A character of several tokens begins with the first of them."""


class Aligned:
    """The tokens of one choice, placed in its text."""

    def __init__(self, hides: Callable[[int], bool]) -> None:
        """Start at the beginning of a text; `hides` tells ids whose text is left out of it."""
        self._hides = hides
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._place = 0
        self._shown = 0
        self._held: deque[Placed] = deque()

    def echo(self, ids: Sequence[int], reports: Sequence[TokenLogprobs | None], first: str, length: int) -> None:
        """Take in a prompt that the text repeats, whose first token is `first` and which takes `length` characters.

        All of its tokens are listed, those that the text hides as well.
        """
        for token, report in zip(ids, reports, strict=True):
            self._hold(token, report, first.encode() if report is None else report.bytes, first)
        extra = max(self._place - length, 0)  # the space that some vocabularies put before a text
        self._held = deque(each._replace(start=max(each.start - extra, 0)) for each in self._held)
        self._place = self._shown = length
        self._decoder.reset()

    def take(self, text: str, tokens: Sequence[Token]) -> None:
        """Take in what a choice gained."""
        self._shown += len(text)
        for token in tokens:
            if token.logprobs is not None:
                self._hold(token.logprobs.id, token.logprobs, token.logprobs.bytes)

    def _hold(self, token: int, report: TokenLogprobs | None, piece: bytes, text: str = "") -> None:
        self._held.append(Placed(report, text if report is None else report.token, self._place))
        if not self._hides(token):
            self._place += len(self._decoder.decode(piece))

    def all(self) -> list[Placed]:
        """Every token that was not given before."""
        found = [each if each.start <= self._shown else each._replace(start=self._shown) for each in self._held]
        self._held.clear()
        return found

    def shown(self, *, cut: bool = False, over: bool = False) -> list[Placed]:
        """Tokens, not given before, whose text begins within what was shown.

        Args:
            cut: The text ended at a token or a string that is not shown.
            over: Nothing follows; the rest is given as well, unless it was cut.
        """
        if over and not cut:
            return self.all()
        found = []
        while self._held and self._held[0].start < self._shown:
            found.append(self._held.popleft())
        return found


def chat_logprobs(placed: Sequence[Placed]) -> dict[str, Any] | None:
    """The object of chats; None where there is no token."""
    content = [
        _in_chat(each.entry) | {"top_logprobs": [_in_chat(other) for other in each.entry.top_logprobs]}
        for each in placed
        if each.entry is not None
    ]
    return {"content": content, "refusal": None} if content else None


def _in_chat(entry: Logprob) -> dict[str, Any]:
    return {"token": entry.token, "logprob": entry.logprob, "bytes": list(entry.bytes)}


def completion_logprobs(placed: Sequence[Placed], top: int) -> dict[str, Any] | None:
    """The object of completions, with the `top` likeliest tokens at each place; None where there is no token."""
    if not placed:
        return None
    return {
        "text_offset": [each.start for each in placed],
        "token_logprobs": [None if each.entry is None else each.entry.logprob for each in placed],
        "tokens": [each.token if each.entry is None else _in_completion(each.entry) for each in placed],
        "top_logprobs": [_top(each.entry, top) for each in placed] if top else None,
    }


def _top(entry: TokenLogprobs | None, top: int) -> dict[str, float] | None:
    """The likeliest tokens, and the one that is there if it is none of them."""
    if entry is None:
        return None
    found: dict[str, float] = {}
    for other in [*entry.top_logprobs[:top], entry]:
        found.setdefault(_in_completion(other), other.logprob)
    return found


def _in_completion(entry: Logprob) -> str:
    if entry.token.encode() == entry.bytes:
        return entry.token
    return _BYTES + "".join(f"\\x{byte:02x}" for byte in entry.bytes)
