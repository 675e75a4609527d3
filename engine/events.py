"""Results of a generation as a caller sees them: tokens, chunks, choices and usage; plain values.

Next to read: scheduling/request.py, the engine's own view of the same generation.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

from pydantic import TypeAdapter

__all__ = ["Choice", "Chunk", "Completion", "FinishReason", "Logprob", "Token", "TokenLogprobs", "Usage"]

FinishReason: TypeAlias = Literal["stop", "length", "cancelled", "deadline"]
"""Reason for which a choice ended: `stop` at an end-of-sequence token, a stop token or a stop string; `length` at
`max_tokens`, the context or the page pool; `cancelled` by the caller or by closing the engine; `deadline` when its time
was up."""


@dataclass(slots=True, kw_only=True)
class Logprob:
    """One token at one position and its log-probability there, before any sampling option is applied."""

    id: int
    token: str
    """Text of the token, with U+FFFD for bytes that are no whole character."""
    bytes: bytes
    logprob: float
    """Natural logarithm of the token's probability."""
    rank: int
    """Rank by probability, 1 for the likeliest token."""


@dataclass(slots=True, kw_only=True)
class TokenLogprobs(Logprob):
    """Log-probabilities at one position: of the token there, and of the likeliest ones."""

    top_logprobs: list[Logprob]
    """The likeliest tokens, as many as were asked for, likeliest first; they may include the token itself."""


@dataclass(slots=True, kw_only=True)
class Token:
    """One generated token of one choice."""

    id: int | None
    """Vocabulary id; None on a terminal item that carries no token (a cancelled choice)."""
    text: str
    """Characters that this token completes; empty while a character is incomplete or a stop string may follow. Joined
    over a choice they are exactly the decoded completion."""
    index: int = 0
    """Number of the choice that the token belongs to, from 0 to `n` - 1."""
    position: int
    """Position of the token in its choice, from 0."""
    finish_reason: FinishReason | None = None
    """Reason for which the choice ended, on its last item and on no other."""
    stop_string: str | None = None
    """Stop string that ended the choice, on its last item alone; None if something else ended it."""
    logprob: float | None = None
    """Natural-log probability, if the request asks for log-probabilities."""
    logprobs: TokenLogprobs | None = None
    """Log-probability of the token with its rank and with alternatives, if the request asks for log-probabilities."""
    score: float | None = None
    """Score of a beam, as in `Choice.score`, on its last item alone; None without beam search."""


@dataclass(slots=True, kw_only=True)
class Chunk:
    """All tokens of a stream since its last read."""

    text: str
    tokens: list[Token]


@dataclass(slots=True, kw_only=True)
class Usage:
    """Token counts of one request, over all its choices."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    """Prompt tokens whose keys and values came from the prefix cache."""


@dataclass(slots=True, kw_only=True)
class Choice:
    """One finished choice of a completion."""

    index: int
    text: str
    token_ids: list[int]
    finish_reason: FinishReason
    logprobs: list[TokenLogprobs] | None = None
    """Log-probabilities of each of `token_ids`, if the request asks for them."""
    mean_logprob: float | None = None
    """Mean log-probability of the tokens, if the request asks for log-probabilities or for `best_of`, which ranks by
    it."""
    score: float | None = None
    """Natural-log probability of a beam divided by its length in tokens to the power `length_penalty`, by which beams
    are ranked; None without beam search."""
    described: Any = field(default=None, repr=False, compare=False)
    """Class that `ResponseFormat.json_schema` was given; None if it was given none."""
    _parsed: Any = field(default=None, init=False, repr=False, compare=False)

    @property
    def parsed(self) -> Any:
        """Instance of the class that `ResponseFormat.json_schema` was given, made from the text on first access.

        None if it was given no class, or if the choice did not end with `stop`, so that its text may be cut.

        Raises:
            pydantic.ValidationError: A validator of the class rejects a value that its JSON schema admits.
        """
        if self._parsed is None and self.described is not None and self.finish_reason == "stop":
            self._parsed = TypeAdapter(self.described).validate_json(self.text)
        return self._parsed


@dataclass(slots=True, kw_only=True)
class Completion:
    """The whole answer of `Engine.generate`."""

    prompt_token_ids: list[int]
    choices: list[Choice]
    usage: Usage
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    """Log-probabilities of each of `prompt_token_ids`, None for the first, if the request asks for them."""

    @property
    def parsed(self) -> Any:
        """Value of `parsed` of the first choice."""
        return self.choices[0].parsed
