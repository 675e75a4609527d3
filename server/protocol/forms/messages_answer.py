"""`MessageAnswer`: the answer of POST /v1/messages, as Anthropic's events or as one body; never sends anything."""

from __future__ import annotations

import secrets
from typing import Any

import orjson
from pydantic_core import from_json

from headrace.engine import Usage
from headrace.server.errors import ApiError, messages_error_body
from headrace.server.protocol.answers import Piece, typed_event
from headrace.server.protocol.blocks import Block, BlockReader, Step

__all__ = ["MessageAnswer"]

_DELTAS = {
    "reasoning": b'{"type":"thinking_delta","thinking":',
    "text": b'{"type":"text_delta","text":',
    "call": b'{"type":"input_json_delta","partial_json":',
}


class MessageAnswer:
    """One message: a content block for each block of the answer."""

    def __init__(self, model: str, prompt_tokens: int, reader: BlockReader) -> None:
        """Start empty.

        Args:
            model: Name of the model that the client used.
            prompt_tokens: Number of tokens of the prompt.
            reader: Reader of the only choice.
        """
        self._body: dict[str, Any] = {
            "id": f"msg_{secrets.token_hex(16)}",
            "type": "message",
            "role": "assistant",
            "model": model,
            "container": None,
            "diagnostics": None,
        }
        self._prompt_tokens = prompt_tokens
        self._reader = reader

    # -- as a stream ------------------------------------------------------------------------------------------------

    def opening(self) -> bytes:
        """Return the event of the empty message; the end of the stream says how much of the prompt was cached."""
        usage = self._whole_usage(Usage(prompt_tokens=self._prompt_tokens))
        stop = {"stop_details": None, "stop_reason": None, "stop_sequence": None}
        body = self._body | {"content": [], **stop, "usage": usage}
        return typed_event({"type": "message_start", "message": body})

    def feed(self, piece: Piece) -> bytes:
        """Add a piece, and return the events for it."""
        return b"".join([_event_of(step) for step in self._reader.feed(piece)])

    def closing(self, usage: Usage) -> bytes:
        """Return the events with the stop reason and the usage."""
        delta = {"container": None, **self._stop()}
        event = {"type": "message_delta", "delta": delta, "usage": self._usage(usage)}
        return typed_event(event) + typed_event({"type": "message_stop"})

    def failing(self, error: ApiError) -> bytes:
        """Return the event of the error."""
        return typed_event(messages_error_body(error))

    # -- as one body ------------------------------------------------------------------------------------------------

    def keep(self, piece: Piece) -> None:
        """Add a piece for `whole`."""
        self._reader.feed(piece)

    def whole(self, usage: Usage) -> bytes:
        """Return the finished message."""
        content = [_content(block, block.text) for block in self._reader.blocks]
        return orjson.dumps(self._body | {"content": content, **self._stop(), "usage": self._whole_usage(usage)})

    def _stop(self) -> dict[str, str | None]:
        reader = self._reader
        if reader.finish_reason == "length":
            reason = "max_tokens"
        elif reader.stop_string is not None:
            reason = "stop_sequence"
        else:
            reason = "tool_use" if reader.called else "end_turn"
        return {"stop_details": None, "stop_reason": reason, "stop_sequence": reader.stop_string}

    def _whole_usage(self, usage: Usage) -> dict[str, Any]:
        """Return the usage of a message, which has more fields than the usage at the end of a stream."""
        return self._usage(usage) | {
            "cache_creation": {"ephemeral_1h_input_tokens": 0, "ephemeral_5m_input_tokens": 0},
            "inference_geo": None,
            "service_tier": "standard",
            "speed": None,
        }

    def _usage(self, usage: Usage) -> dict[str, Any]:
        """Return Anthropic's counts, whose `input_tokens` are the tokens that were not cached."""
        return {
            "input_tokens": usage.prompt_tokens - usage.cached_tokens,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": usage.cached_tokens,
            "output_tokens": usage.completion_tokens,
            "output_tokens_details": {"thinking_tokens": self._reader.reasoning_tokens},
            "server_tool_use": None,
        }


def _event_of(step: Step) -> bytes:
    what, block, text = step
    if what == "added":
        head = b'event: content_block_delta\ndata: {"type":"content_block_delta","index":%d,"delta":' % block.index
        return b"%b%b%b}}\n\n" % (head, _DELTAS[block.kind], orjson.dumps(text))
    if what == "opened":
        return typed_event({"type": "content_block_start", "index": block.index, "content_block": _content(block, "")})
    return typed_event({"type": "content_block_stop", "index": block.index})


def _content(block: Block, text: str) -> dict[str, Any]:
    """Return a block as Anthropic's content block."""
    if block.kind == "reasoning":
        return {"type": "thinking", "thinking": text, "signature": ""}  # nothing is signed here
    if block.kind == "text":
        return {"type": "text", "text": text, "citations": None}
    call = {"id": block.call_id, "name": block.name, "input": _arguments(text)}
    return {"type": "tool_use", "caller": {"type": "direct"}, **call}


def _arguments(text: str) -> Any:
    """Return the arguments in `text`, which a limit may have cut; clients read cut ones in the same way."""
    try:
        return from_json(text, allow_partial=True) if text else {}
    except ValueError:
        return {}
