"""Completions: the fields of a request, and its answer as chunks or as one body; never sends anything."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Annotated, Any, NamedTuple

import orjson
from pydantic import Field

from headrace.engine import Usage
from headrace.server.errors import ApiError, error_event
from headrace.server.protocol.answers import Header, Piece, event, usage_body
from headrace.server.protocol.documented import Also
from headrace.server.protocol.fields import Bool, RequestFields
from headrace.server.protocol.logprobs import Aligned, Placed, completion_logprobs

__all__ = ["TEXTS_OR_IDS", "CompletionAnswer", "CompletionFields", "Echo", "prompts_of"]

_DEFAULT_TOKENS = 16  # OpenAI's default
_NO_IDS = frozenset({str, list, dict, type(None)})  # no token ids; the engine names the place of other types
_TEXT = {"type": "string", "minLength": 1}
_IDS = {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 1}
_LISTS = [{"type": "array", "items": one, "minItems": 1} for one in (_TEXT, _IDS)]
TEXTS_OR_IDS = Also({"anyOf": [_TEXT, _IDS, *_LISTS]})


class CompletionFields(RequestFields):
    """Body of POST /v1/completions."""

    prompt: Annotated[Any, TEXTS_OR_IDS]
    echo: Bool | None = None
    max_tokens: Annotated[int, Field(strict=True, ge=0, lt=2**31)] | None = None
    logprobs: Annotated[int, Field(strict=True, ge=0, le=5)] | None = None
    add_special_tokens: Bool | None = None

    @property
    def limit(self) -> int:
        """Largest number of tokens of each choice; 1 where only the echo is wanted, since the engine makes one.

        Raises:
            ApiError: The client asks for neither tokens nor an echo.
        """
        if self.max_tokens == 0 and not self.echo:
            raise ApiError(
                400, "invalid_value", "max_tokens: must be at least 1 without echo, got 0", param="max_tokens"
            )
        return _DEFAULT_TOKENS if self.max_tokens is None else max(self.max_tokens, 1)

    @property
    def names(self) -> dict[str, str]:
        """Engine's name of a field -> the name that the client used, where they differ."""
        return super().names | {"prompt_logprobs": "logprobs"}


def prompts_of(value: Any, most: int, name: str = "prompt") -> list[str | list[int]]:
    """Return the prompts in the field `name`, which holds a text, token ids, or a list of either.

    Raises:
        ApiError: The field holds something else, nothing, or more than `most` prompts.
    """
    several = isinstance(value, list) and bool(value) and isinstance(value[0], str | list)
    prompts = value if several else [value]
    if len(prompts) > most:
        raise ApiError(400, "invalid_value", f"{name}: at most {most} here, got {len(prompts)}", param=name)
    for place, prompt in enumerate(prompts):
        param = f"{name}[{place}]" if several else name
        if not isinstance(prompt, str | list) or type(prompt) is not type(prompts[0]):
            raise _malformed(param)
        if not prompt:
            raise ApiError(400, "empty_prompt", f"{param}: is empty", param=param)
        if isinstance(prompt, list) and not _NO_IDS.isdisjoint(map(type, prompt)):
            raise _malformed(param)
    return prompts


class Echo(NamedTuple):
    """A prompt that its choices repeat."""

    text: str
    ids: list[int]
    first: str
    """Text of the first id, which has no log-probability."""


def _malformed(param: str) -> ApiError:
    return ApiError(400, "invalid_type", f"{param}: must be text, token ids, or a list of either", param=param)


class CompletionAnswer:
    """All choices of all prompts of one completions request."""

    def __init__(
        self,
        header: Header,
        choices: int,
        *,
        include_usage: bool,
        echoes: Sequence[Echo] = (),
        only_echoes: bool = False,
        logprobs: int | None = None,
        make_aligned: Callable[[], Aligned],
    ) -> None:
        """Start empty.

        Args:
            header: Fields that the chunks repeat.
            choices: Number of prompts times choices of each.
            include_usage: Whether a stream ends with usage.
            echoes: Prompt that each choice starts with; empty if nothing is echoed.
            only_echoes: Whether to leave out generated text.
            logprobs: Number of likeliest tokens to report with each token; None reports no log-probabilities.
            make_aligned: Function that makes the log-probabilities of one choice.
        """
        self._header = header
        self._include_usage = include_usage
        self._echoes = echoes
        self._only_echoes = only_echoes
        self._top = logprobs
        self._aligned = [make_aligned() for _ in range(choices)] if logprobs is not None else []
        self._unechoed = set(range(len(echoes)))
        self._texts: list[list[str]] = [[] for _ in range(choices)]
        self._placed: list[list[Placed]] = [[] for _ in range(choices)]
        self._reasons = ["length"] * choices
        start = orjson.dumps(header.body("text_completion"))[:-1]
        self._heads = [b'data: %b,"choices":[{"index":%d,"text":' % (start, index) for index in range(choices)]
        self._tail = b',"usage":null}\n\n' if include_usage else b"}\n\n"

    def opening(self) -> bytes:
        """Return the echoed prompts, unless they come later with their log-probabilities."""
        if self._aligned:
            return b""
        return b"".join(self._chunk(index, echo.text, b"null") for index, echo in enumerate(self._echoes))

    def feed(self, piece: Piece) -> bytes:
        """Add a piece, and return the chunks for it."""
        index, text, reason = piece[:3]
        frames = b""
        logprobs = b"null"
        if self._aligned:
            if echo := self._echo(piece):
                frames = self._chunk(index, echo, b"null", self._logprobs(index))
            self._take(piece)
            logprobs = self._logprobs(index)
        if self._only_echoes:
            text = ""
        if reason is not None:
            return frames + self._chunk(index, text, b'"%b"' % self._reason(reason).encode(), logprobs)
        if text or logprobs != b"null":
            frames += self._chunk(index, text, b"null", logprobs)
        return frames

    def closing(self, usage: Usage) -> bytes:
        """Return the chunk with usage, if the client asked for one."""
        if not self._include_usage:
            return b""
        body = usage_body(self._counted(usage))
        return event(self._header.body("text_completion") | {"choices": [], "usage": body})

    def failing(self, error: ApiError) -> bytes:
        """Return the event of the error, which ends the stream."""
        return error_event(error)

    def _chunk(self, index: int, text: str, reason: bytes, logprobs: bytes = b"null") -> bytes:
        parts = [self._heads[index], orjson.dumps(text), b',"logprobs":', logprobs, b',"finish_reason":', reason, b"}]"]
        return b"".join([*parts, self._tail])

    def _reason(self, reason: str) -> str:
        return "length" if self._only_echoes else reason

    def _counted(self, usage: Usage) -> Usage:
        return replace(usage, completion_tokens=0) if self._only_echoes else usage

    # -- log-probabilities ------------------------------------------------------------------------------------------

    def _echo(self, piece: Piece) -> str:
        """Return the prompt that a choice echoes and add its tokens, at the first piece; "" at later ones."""
        index = piece.choice
        if index not in self._unechoed:
            return ""
        self._unechoed.remove(index)
        echo = self._echoes[index]
        self._aligned[index].echo(echo.ids, piece.prompt or [None] * len(echo.ids), echo.first, len(echo.text))
        return echo.text

    def _take(self, piece: Piece) -> None:
        if not self._only_echoes:
            self._aligned[piece.choice].take(piece.text, piece.tokens)

    def _logprobs(self, index: int) -> bytes:
        """Return the log-probabilities of the tokens that were added since the last call, as JSON."""
        return orjson.dumps(completion_logprobs(self._aligned[index].all(), self._top or 0))

    # -- as one body ------------------------------------------------------------------------------------------------

    def keep(self, piece: Piece) -> None:
        """Add a piece for `whole`."""
        index = piece.choice
        if self._aligned:
            self._echo(piece)
            self._take(piece)
            self._placed[index] += self._aligned[index].all()
        if not self._only_echoes:
            self._texts[index].append(piece.text)
        if piece.finish_reason is not None:
            self._reasons[index] = self._reason(piece.finish_reason)

    def whole(self, usage: Usage) -> bytes:
        """Return the finished answer."""
        choices = [
            {
                "index": index,
                "text": (self._echoes[index].text if self._echoes else "") + "".join(texts),
                "logprobs": None if self._top is None else completion_logprobs(self._placed[index], self._top),
                "finish_reason": reason,
            }
            for index, (texts, reason) in enumerate(zip(self._texts, self._reasons, strict=True))
        ]
        body = {"choices": choices, "usage": usage_body(self._counted(usage))}
        return orjson.dumps(self._header.body("text_completion") | body)
