"""Log-probabilities as OpenAI's two APIs write them, in step with the text of a choice; asks the engine for none."""

from __future__ import annotations

import codecs
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple

from headrace.engine import Logprob, Token, TokenLogprobs

__all__ = ["Aligned", "Placed", "chat_logprobs", "completion_logprobs"]

_BYTES: Final = "bytes:"
"""Prefix of the escaped bytes of a token that is no whole character, as in OpenAI's completions."""


class Placed(NamedTuple):
    """A token's log-probabilities, and the place of its text in that of its choice."""

    entry: TokenLogprobs | None
    """Log-probabilities of the token; None for the first one of a prompt, before which nothing stands."""
    token: str
    start: int
    """Place of the text, in characters; a character of several tokens begins with the first of them."""


class Aligned:
    """The tokens of one choice, placed in its text."""

    def __init__(self, hides: Callable[[int], bool]) -> None:
        """Start at the beginning of a text; `hides` returns whether the text of an id is left out."""
        self._hides = hides
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._place = 0
        self._shown = 0
        self._held: deque[Placed] = deque()

    def echo(self, ids: Sequence[int], reports: Sequence[TokenLogprobs | None], first: str, length: int) -> None:
        """Add a prompt that the text repeats, whose first token is `first` and which takes `length` characters.

        All tokens of the prompt are listed, even if the text hides them.
        """
        for token, report in zip(ids, reports, strict=True):
            self._hold(token, report, first.encode() if report is None else report.bytes, first)
        extra = max(self._place - length, 0)  # the space that some vocabularies put before a text
        self._held = deque(each._replace(start=max(each.start - extra, 0)) for each in self._held)
        self._place = self._shown = length
        self._decoder.reset()

    def take(self, text: str, tokens: Sequence[Token]) -> None:
        """Add the text and the tokens that a choice gained."""
        self._shown += len(text)
        for token in tokens:
            if token.logprobs is not None:
                self._hold(token.logprobs.id, token.logprobs, token.logprobs.bytes)

    def _hold(self, token: int, report: TokenLogprobs | None, piece: bytes, text: str = "") -> None:
        self._held.append(Placed(report, text if report is None else report.token, self._place))
        if not self._hides(token):
            self._place += len(self._decoder.decode(piece))

    def all(self) -> list[Placed]:
        """Return every token that was not returned before."""
        found = [each if each.start <= self._shown else each._replace(start=self._shown) for each in self._held]
        self._held.clear()
        return found

    def shown(self, *, cut: bool = False, over: bool = False) -> list[Placed]:
        """Return the tokens, not returned before, whose text begins within the text that was shown.

        Args:
            cut: Whether the text ended at a token or a string that is not shown.
            over: Whether nothing follows; then the rest is returned as well, unless the text was cut.
        """
        if over and not cut:
            return self.all()
        found = []
        while self._held and self._held[0].start < self._shown:
            found.append(self._held.popleft())
        return found


def chat_logprobs(placed: Sequence[Placed]) -> dict[str, Any] | None:
    """Return the log-probabilities in the form of chats; None where there is no token."""
    content = [
        _in_chat(each.entry) | {"top_logprobs": [_in_chat(other) for other in each.entry.top_logprobs]}
        for each in placed
        if each.entry is not None
    ]
    return {"content": content, "refusal": None} if content else None


def _in_chat(entry: Logprob) -> dict[str, Any]:
    return {"token": entry.token, "logprob": entry.logprob, "bytes": list(entry.bytes)}


def completion_logprobs(placed: Sequence[Placed], top: int) -> dict[str, Any] | None:
    """Return the log-probabilities in the form of completions, with the `top` likeliest tokens at each place.

    Return None where there is no token.
    """
    if not placed:
        return None
    return {
        "text_offset": [each.start for each in placed],
        "token_logprobs": [None if each.entry is None else each.entry.logprob for each in placed],
        "tokens": [each.token if each.entry is None else _in_completion(each.entry) for each in placed],
        "top_logprobs": [_top(each.entry, top) for each in placed] if top else None,
    }


def _top(entry: TokenLogprobs | None, top: int) -> dict[str, float] | None:
    """Return the likeliest tokens, and the chosen one if it is not among them."""
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
