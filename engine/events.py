"""What a caller sees of a generation: tokens, chunks, choices and usage; plain values.

Next to read: scheduling/request.py, the engine's own view of the same generation.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

from pydantic import TypeAdapter

__all__ = ["Choice", "Chunk", "Completion", "FinishReason", "Logprob", "Token", "TokenLogprobs", "Usage"]

FinishReason: TypeAlias = Literal["stop", "length", "cancelled", "deadline"]
"""Why a choice ended: `stop` at an end-of-sequence token, a stop token or a stop string; `length` at `max_tokens`, the
context or the page pool; `cancelled` by the caller or by closing the engine; `deadline` when its time was up."""


@dataclass(slots=True, kw_only=True)
class Logprob:
    """One token at one position and how likely the model finds it there, before any sampling option had its say."""

    id: int
    token: str
    """Text of the token, with U+FFFD for bytes that are no whole character."""
    bytes: bytes
    logprob: float
    """Natural logarithm of its probability."""
    rank: int
    """1 for the likeliest."""


@dataclass(slots=True, kw_only=True)
class TokenLogprobs(Logprob):
    """The token that is at a position, and the likeliest ones there."""

    top_logprobs: list[Logprob]
    """The likeliest tokens, as many as were asked for, likeliest first; the token itself may be among them."""


@dataclass(slots=True, kw_only=True)
class Token:
    """One generated token of one choice."""

    id: int | None
    """Vocabulary id; None on a terminal item that carries no token (a cancelled choice)."""
    text: str
    """The characters this token completes; empty while a character is still incomplete or a stop string may still
    follow. Joined over a choice it is exactly the decoded completion."""
    index: int = 0
    """Number of the choice that the token belongs to, from 0 to `n` - 1."""
    position: int
    """Place in its choice, from 0."""
    finish_reason: FinishReason | None = None
    """Set on the last item of each choice and on no other."""
    stop_string: str | None = None
    """Which stop string ended the choice; None where something else did. Also on the last item alone."""
    logprob: float | None = None
    """Natural-log probability, where the request asks for log-probabilities."""
    logprobs: TokenLogprobs | None = None
    """The token's log-probability with its rank and with alternatives."""
    score: float | None = None
    """Score of a beam, as `Choice.score`, on its last item alone; None where no beam search was asked for."""


@dataclass(slots=True, kw_only=True)
class Chunk:
    """All tokens of a stream since its reader last looked."""

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
    """One for each of `token_ids`, where the request asks for them."""
    mean_logprob: float | None = None
    """Over the tokens, where the request asks for log-probabilities or `best_of`, which ranks by it."""
    score: float | None = None
    """Natural-log probability of a beam divided by its length in tokens to the power `length_penalty`, by which beams
    are ranked; None where no beam search was asked for."""
    described: Any = field(default=None, repr=False, compare=False)
    """The class that `ResponseFormat.json_schema` was given; None where it was given none."""
    _parsed: Any = field(default=None, init=False, repr=False, compare=False)

    @property
    def parsed(self) -> Any:
        """The instance of the class that `ResponseFormat.json_schema` was given, made of the text at the first look.

        None where it was given none, or where the choice did not end with `stop`, so that its text may be cut.

        Raises:
            pydantic.ValidationError: A validator of the class refuses what its JSON schema admits.
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
    """One for each of `prompt_token_ids`, None for the first, where the request asks for them."""

    @property
    def parsed(self) -> Any:
        """`parsed` of the first choice."""
        return self.choices[0].parsed
