"""`TokenMaker`: turns the items that the step loop delivers into the tokens that a caller sees; keeps no queue.

Next to read: generation.py, which delivers, and stream.py, which hands tokens out.
"""

from __future__ import annotations

from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from typing import NamedTuple

from headrace.engine.delivery.logprobs import token_logprobs
from headrace.engine.events import FinishReason, Token
from headrace.engine.params import SamplingParams
from headrace.engine.scheduling.shaping import Report
from headrace.engine.tokens.text import Detokenizer, SpacedDetokenizer, TokenTable

__all__ = ["Delivered", "TokenMaker", "detokenizer_of"]


_new_token = Token.__new__


class Delivered(NamedTuple):
    """One committed token of one choice, on its way to the reader."""

    choice: int
    id: int | None
    text: str | None
    """Text of the token, which stop strings need early; None if the reader turns the id into text."""
    finish_reason: FinishReason | None
    report: Report | None = None
    """Log-probabilities, if they are wanted."""
    stop_string: str | None = None
    """The stop string that ended the choice, if one did."""
    token: Token | None = None
    """The token for the reader, if a hook has seen it already."""
    score: float | None = None
    """Score of a beam, with its last token."""


class TokenMaker:
    """Makes the tokens of one stream, each choice's in order."""

    def __init__(self, table: TokenTable, params: SamplingParams, stop_ids: AbstractSet[int]) -> None:
        """Turn ids into text by `table` under `params`; `stop_ids` end a choice."""
        self.table = table
        self._hidden: AbstractSet[int] = frozenset() if params.include_stop_str_in_output else stop_ids
        self._detokenizers = [detokenizer_of(table, params) for _ in range(params.n)]
        self._positions = [0] * params.n

    def make(self, item: Delivered) -> Token:
        """Return the token of a delivered item."""
        choice, identity, text, reason, report, stop, _, score = item
        if text is None:
            hidden = identity is None or (reason == "stop" and identity in self._hidden)
            text = "" if hidden or identity is None else self._detokenizers[choice].feed(identity)
            if reason is not None:
                text += self.flush(choice)
        position = self._positions[choice]
        self._positions[choice] = position + 1
        token = _token(identity, text, choice, position, reason, stop)
        if report is not None and identity is not None:
            token.logprob = report.logprob
            token.logprobs = token_logprobs(self.table, identity, report)
        if score is not None:
            token.score = score
        return token

    def skip(self, ids: Sequence[int]) -> None:
        """Begin the only choice after its first tokens, whose text has been shown."""
        for token in ids:
            self._detokenizers[0].feed(token)
        self._positions[0] = len(ids)

    def flush(self, choice: int) -> str:
        """Return the rest of a choice's text, which ends here."""
        return self._detokenizers[choice].flush()


def _token(
    identity: int | None, text: str, choice: int, position: int, reason: FinishReason | None, stop: str | None
) -> Token:
    """Return a `Token`, built in a third of the time of its own constructor."""
    token = _new_token(Token)
    token.id = identity
    token.text = text
    token.index = choice
    token.position = position
    token.finish_reason = reason
    token.stop_string = stop
    token.logprob = token.logprobs = token.score = None
    return token


def detokenizer_of(table: TokenTable, params: SamplingParams) -> Detokenizer:
    """Return the detokenizer for the ids of one choice under `params`."""
    if params.spaces_between_special_tokens and not params.skip_special_tokens:
        return SpacedDetokenizer(table)
    return Detokenizer(table, params.skip_special_tokens)
