"""Parts that all answers share: ids, usage, events and pieces; never sends anything."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import orjson

from headrace.engine import Chunk, FinishReason, Token, TokenLogprobs, Usage
from headrace.server.errors import ApiError

__all__ = ["Answer", "Header", "Piece", "add_usage", "event", "pieces", "typed_event", "usage_body"]


class Piece(NamedTuple):
    """The text and tokens that one choice gained since the last piece."""

    choice: int
    text: str
    finish_reason: FinishReason | None
    tokens: Sequence[Token] = ()
    """Tokens whose ids made the text, or will make the text of a later piece."""
    prompt: Sequence[TokenLogprobs | None] | None = None
    """Log-probabilities of the prompt, where they are wanted; the same in every piece."""


class Header(NamedTuple):
    """The fields that all chunks of an answer repeat."""

    id: str
    created: int
    model: str
    fingerprint: str

    @classmethod
    def new(cls, prefix: str, created: int, model: str, fingerprint: str) -> Header:
        """Return a header with a new random id that begins with `prefix`."""
        return cls(f"{prefix}-{secrets.token_hex(16)}", created, model, fingerprint)

    def body(self, kind: str) -> dict[str, Any]:
        """Return the fields, with `kind` as the object's type."""
        names = {"model": self.model, "system_fingerprint": self.fingerprint}
        return {"id": self.id, "object": kind, "created": self.created, **names}


class Answer(Protocol):
    """The answer to one request, which grows piece by piece, for a stream or for one body."""

    def opening(self) -> bytes:
        """Return the events before the first token."""
        ...

    def feed(self, piece: Piece) -> bytes:
        """Add a piece, and return the events for it."""
        ...

    def closing(self, usage: Usage) -> bytes:
        """Return the events after the last token, without the final mark."""
        ...

    def failing(self, error: ApiError) -> bytes:
        """Return the last events of a stream that failed."""
        ...

    def keep(self, piece: Piece) -> None:
        """Add a piece for `whole`, where nothing is streamed."""
        ...

    def whole(self, usage: Usage) -> bytes:
        """Return the body of the finished answer."""
        ...


def pieces(
    chunk: Chunk, choices: int, first: int, prompt: Sequence[TokenLogprobs | None] | None = None
) -> Sequence[Piece]:
    """Return the pieces of a chunk, one for each choice in it; choices count from `first`."""
    if choices == 1:
        return (Piece(first, chunk.text, chunk.tokens[-1].finish_reason, chunk.tokens, prompt),)
    groups: dict[int, list[Token]] = {}
    for token in chunk.tokens:
        groups.setdefault(token.index, []).append(token)
    return [
        Piece(first + index, "".join([token.text for token in tokens]), tokens[-1].finish_reason, tokens, prompt)
        for index, tokens in groups.items()
    ]


def event(value: Any) -> bytes:
    """Return a server-sent event with `value` as JSON."""
    return b"data: " + orjson.dumps(value) + b"\n\n"


def typed_event(value: dict[str, Any]) -> bytes:
    """Return a server-sent event with `value` as JSON and its `type` as the event's name."""
    return b"event: %b\ndata: %b\n\n" % (value["type"].encode(), orjson.dumps(value))


def add_usage(parts: list[Usage]) -> Usage:
    """Return the sum of the usage of several prompts."""
    return Usage(
        prompt_tokens=sum(part.prompt_tokens for part in parts),
        completion_tokens=sum(part.completion_tokens for part in parts),
        cached_tokens=sum(part.cached_tokens for part in parts),
    )


def usage_body(usage: Usage) -> dict[str, Any]:
    """Return OpenAI's usage object."""
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
    }
