"""`ChatAnswer`: the answer of a chat completion, as chunks or as one body; never sends anything."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import orjson

from headrace.engine import FinishReason, Usage
from headrace.engine.tools import (
    Content,
    Event,
    Parsed,
    Reasoning,
    ToolCallArguments,
    ToolCallStart,
    ToolParser,
    collect,
)
from headrace.server.errors import ApiError, error_event
from headrace.server.protocol.answers import Header, Piece, event, usage_body
from headrace.server.protocol.blocks import read_piece
from headrace.server.protocol.logprobs import Aligned, Placed, chat_logprobs

__all__ = ["ChatAnswer"]


class ChatAnswer:
    """All choices of one chat completion.

    A chunk that only adds content is put together from bytes made once: it is most of what a server sends.
    """

    def __init__(
        self,
        header: Header,
        choices: int,
        *,
        include_usage: bool,
        make_parser: Callable[[], ToolParser] | None,
        make_aligned: Callable[[], Aligned] | None = None,
        parallel_calls: bool = True,
        only_calls: bool = False,
    ) -> None:
        """Start empty.

        Args:
            header: Fields that the chunks repeat.
            choices: Number of choices.
            include_usage: Whether a stream ends with usage.
            make_parser: Function that makes the parser of tool calls and reasoning of one choice; None for plain text.
            make_aligned: Function that makes the log-probabilities of one choice; None where none are wanted.
            parallel_calls: Whether to keep calls after the first one.
            only_calls: Whether calls are forced, so that there is no content.
        """
        self._header = header
        self._include_usage = include_usage
        self._parsers = [make_parser() for _ in range(choices)] if make_parser is not None else []
        self._aligned = [make_aligned() for _ in range(choices)] if make_aligned is not None else []
        self._parallel_calls, self._only_calls = parallel_calls, only_calls
        self._called = [False] * choices
        self._events: list[list[Event]] = [[] for _ in range(choices)]
        self._texts: list[list[str]] = [[] for _ in range(choices)]
        self._placed: list[list[Placed]] = [[] for _ in range(choices)]
        self._reasons: list[str] = ["stop"] * choices
        start = orjson.dumps(header.body("chat.completion.chunk"))[:-1]
        self._heads = [
            b'data: %b,"choices":[{"index":%d,"delta":{"content":' % (start, index) for index in range(choices)
        ]
        tail = b',"usage":null}\n\n' if include_usage else b"}\n\n"
        self._tail = b'},"logprobs":null,"finish_reason":null}]' + tail

    # -- as a stream ------------------------------------------------------------------------------------------------

    def opening(self) -> bytes:
        """Return a chunk for each choice that names its role."""
        first = {"role": "assistant", "content": None if self._only_calls else ""}
        return b"".join(self._chunk(index, first) for index in range(len(self._heads)))

    def feed(self, piece: Piece) -> bytes:
        """Add a piece, and return the chunks for it."""
        index, text, reason = piece[:3]
        if self._aligned:
            return self._with_logprobs(piece)
        if not self._parsers:
            frames = self._heads[index] + orjson.dumps(text) + self._tail if text else b""
        else:
            frames = b"".join([self._of_event(index, each) for each in self._parse(piece)])
        if reason is None:
            return frames
        return frames + self._chunk(index, {}, self._reason(index, reason))

    def _with_logprobs(self, piece: Piece) -> bytes:
        """Return the chunks, the first with the log-probabilities of all tokens that they hold."""
        index, text, reason = piece[:3]
        deltas = [self._delta(index, each) for each in self._parse(piece)] if self._parsers else [{"content": text}]
        deltas = [delta for delta in deltas if delta is not None and delta.get("content") != ""]
        found = chat_logprobs(self._align(piece))
        if not deltas and found is not None:
            deltas = [{} if self._only_calls else {"content": ""}]
        frames = b""
        for delta in deltas:
            frames += self._chunk(index, delta, logprobs=found)
            found = None
        return frames if reason is None else frames + self._chunk(index, {}, self._reason(index, reason))

    def _align(self, piece: Piece) -> list[Placed]:
        """Return the tokens whose text the choice has shown, or its parser has read, with this piece."""
        aligned, reason = self._aligned[piece.choice], piece.finish_reason
        aligned.take(piece.text, piece.tokens)
        return aligned.shown(cut=reason == "stop", over=reason is not None)

    def closing(self, usage: Usage) -> bytes:
        """Return the chunk with usage, if the client asked for one."""
        if not self._include_usage:
            return b""
        return event(self._header.body("chat.completion.chunk") | {"choices": [], "usage": usage_body(usage)})

    def failing(self, error: ApiError) -> bytes:
        """Return the event of the error, which ends the stream."""
        return error_event(error)

    def _parse(self, piece: Piece) -> list[Event]:
        parser = self._parsers[piece.choice]
        return read_piece(parser, piece, parallel=self._parallel_calls, only_calls=self._only_calls)

    def _of_event(self, index: int, each: Event) -> bytes:
        if isinstance(each, Content):
            return self._heads[index] + orjson.dumps(each.text) + self._tail if each.text else b""
        delta = self._delta(index, each)
        return b"" if delta is None else self._chunk(index, delta)

    def _delta(self, index: int, each: Event) -> dict[str, Any] | None:
        """Return the delta that an event adds; None where it adds nothing."""
        if isinstance(each, Content):
            return {"content": each.text}
        if isinstance(each, Reasoning):
            return {"reasoning_content": each.text}
        if isinstance(each, ToolCallStart):
            self._called[index] = True
            function = {"name": each.name, "arguments": ""}
            return {"tool_calls": [{"index": each.index, "id": each.id, "type": "function", "function": function}]}
        if isinstance(each, ToolCallArguments):
            return {"tool_calls": [{"index": each.index, "function": {"arguments": each.text}}]}
        return None

    def _chunk(
        self, index: int, delta: dict[str, Any], reason: str | None = None, logprobs: dict[str, Any] | None = None
    ) -> bytes:
        choice = {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": reason}
        body = self._header.body("chat.completion.chunk") | {"choices": [choice]}
        return event(body | {"usage": None} if self._include_usage else body)

    def _reason(self, index: int, reason: FinishReason) -> str:
        return "tool_calls" if reason == "stop" and self._called[index] else reason

    # -- as one body ------------------------------------------------------------------------------------------------

    def keep(self, piece: Piece) -> None:
        """Add a piece for `whole`."""
        index = piece.choice
        if self._parsers:
            events = self._parse(piece)
            self._called[index] = self._called[index] or any(isinstance(each, ToolCallStart) for each in events)
            self._events[index] += events
        else:
            self._texts[index].append(piece.text)
        if self._aligned:
            self._placed[index] += self._align(piece)
        if piece.finish_reason is not None:
            self._reasons[index] = self._reason(index, piece.finish_reason)

    def whole(self, usage: Usage) -> bytes:
        """Return the finished answer."""
        choices = [
            {
                "index": index,
                "message": self._message(index),
                "logprobs": chat_logprobs(self._placed[index]),
                "finish_reason": reason,
            }
            for index, reason in enumerate(self._reasons)
        ]
        return orjson.dumps(self._header.body("chat.completion") | {"choices": choices, "usage": usage_body(usage)})

    def _message(self, index: int) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": "".join(self._texts[index]), "refusal": None}
        if not self._parsers:
            return message
        parsed: Parsed = collect(self._events[index])
        message["content"] = parsed.content or (None if parsed.tool_calls or self._only_calls else "")
        if parsed.reasoning:
            message["reasoning_content"] = parsed.reasoning
        if parsed.tool_calls:
            message["tool_calls"] = _calls(parsed)
        return message


def _calls(parsed: Parsed) -> Sequence[dict[str, Any]]:
    return [
        {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
        for call in parsed.tool_calls
    ]
