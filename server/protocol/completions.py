"""Completions: the request as it comes in, and its answer as chunks or as one body; never sends anything."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import orjson

from headrace.engine import Usage
from headrace.server.errors import ApiError, error_event
from headrace.server.protocol.answers import Header, Piece, event, usage_body
from headrace.server.protocol.fields import Bool, RequestFields

__all__ = ["CompletionAnswer", "CompletionFields", "prompts_of"]

_DEFAULT_TOKENS = 16  # OpenAI's


class CompletionFields(RequestFields):
    """Body of POST /v1/completions."""

    prompt: Any
    echo: Bool | None = None

    @property
    def limit(self) -> int:
        """Tokens of each choice, at most."""
        return _DEFAULT_TOKENS if self.max_tokens is None else self.max_tokens


def prompts_of(value: Any, most: int) -> list[str | list[int]]:
    """The prompts in a field that holds a text, token ids, or a list of either.

    Raises:
        ApiError: It holds something else, nothing, or more than `most`.
    """
    several = isinstance(value, list) and bool(value) and isinstance(value[0], str | list)
    prompts = value if several else [value]
    if len(prompts) > most:
        raise ApiError(400, "invalid_value", f"prompt: at most {most} prompts here, got {len(prompts)}", param="prompt")
    for place, prompt in enumerate(prompts):
        param = f"prompt[{place}]" if several else "prompt"
        if not isinstance(prompt, str | list) or type(prompt) is not type(prompts[0]):
            raise _malformed(param)
        if not prompt:
            raise ApiError(400, "empty_prompt", f"{param}: is empty", param=param)
        if isinstance(prompt, list) and any(isinstance(part, str | list | dict) or part is None for part in prompt):
            raise _malformed(param)
    return prompts


def _malformed(param: str) -> ApiError:
    return ApiError(400, "invalid_type", f"{param}: must be text, token ids, or a list of either", param=param)


class CompletionAnswer:
    """All choices of all prompts of one completions request."""

    def __init__(self, header: Header, choices: int, *, include_usage: bool, echoes: Sequence[str]) -> None:
        """Start empty.

        Args:
            header: What the chunks repeat.
            choices: Prompts times choices of each.
            include_usage: A stream ends with usage.
            echoes: What each choice starts with; empty if nothing is echoed.
        """
        self._header = header
        self._include_usage = include_usage
        self._echoes = echoes
        self._texts: list[list[str]] = [[echo] for echo in echoes] or [[] for _ in range(choices)]
        self._reasons = ["length"] * choices
        start = orjson.dumps(header.body("text_completion"))[:-1]
        self._heads = [b'data: %b,"choices":[{"index":%d,"text":' % (start, index) for index in range(choices)]
        self._tail = b',"usage":null}\n\n' if include_usage else b"}\n\n"

    def opening(self) -> bytes:
        """What is echoed."""
        return b"".join(self._chunk(index, echo, b"null") for index, echo in enumerate(self._echoes))

    def feed(self, piece: Piece) -> bytes:
        """The chunk that a piece means."""
        index, text, reason, _ = piece
        if reason is None:
            return self._chunk(index, text, b"null") if text else b""
        return self._chunk(index, text, b'"%b"' % reason.encode())

    def closing(self, usage: Usage) -> bytes:
        """The chunk with usage, if it was asked for."""
        if not self._include_usage:
            return b""
        return event(self._header.body("text_completion") | {"choices": [], "usage": usage_body(usage)})

    def failing(self, error: ApiError) -> bytes:
        """The error, which ends the stream."""
        return error_event(error)

    def _chunk(self, index: int, text: str, reason: bytes) -> bytes:
        return b"".join(
            [self._heads[index], orjson.dumps(text), b',"logprobs":null,"finish_reason":', reason, b"}]", self._tail]
        )

    def keep(self, piece: Piece) -> None:
        """Take a piece in, for `whole`."""
        self._texts[piece.choice].append(piece.text)
        if piece.finish_reason is not None:
            self._reasons[piece.choice] = piece.finish_reason

    def whole(self, usage: Usage) -> bytes:
        """The finished answer."""
        choices = [
            {"index": index, "text": "".join(texts), "logprobs": None, "finish_reason": reason}
            for index, (texts, reason) in enumerate(zip(self._texts, self._reasons, strict=True))
        ]
        return orjson.dumps(self._header.body("text_completion") | {"choices": choices, "usage": usage_body(usage)})
