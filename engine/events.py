"""What a caller sees of a generation: tokens, chunks, choices and usage; plain values, never behaviour.

Next to read: scheduling/request.py, the engine's own view of the same generation.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

__all__ = ["Choice", "Chunk", "Completion", "FinishReason", "Token", "Usage"]

FinishReason: TypeAlias = Literal["stop", "length", "cancelled"]
"""Why a choice ended: `stop` at an end-of-sequence token, a stop token or a stop string; `length` at `max_tokens`, the
context or the page pool; `cancelled` by the caller or by closing the engine."""


@dataclass(slots=True, kw_only=True)
class Token:
    """One generated token of one choice."""

    id: int | None
    """Vocabulary id; None on a terminal item that carries no token (a cancelled choice)."""
    text: str
    """The characters this token completes; empty while a character is still incomplete or a stop string may still
    follow. Joined over a choice it is exactly the decoded completion."""
    index: int = 0
    """Which of the `n` choices this token belongs to."""
    position: int
    """Place in its choice, from 0."""
    finish_reason: FinishReason | None = None
    """Set on the last item of each choice and on no other."""
    logprob: float | None = None
    """Natural-log probability, where the request asks for log-probabilities."""


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


@dataclass(slots=True, kw_only=True)
class Completion:
    """The whole answer of `Engine.generate`."""

    prompt_token_ids: list[int]
    choices: list[Choice]
    usage: Usage
