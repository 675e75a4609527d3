"""`ResponseAnswer`: the answer of POST /v1/responses, as typed events or as one body; never sends anything."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable
from typing import Any, Final

import orjson

from headrace.engine import Usage
from headrace.server.errors import ApiError
from headrace.server.protocol.answers import Piece, typed_event
from headrace.server.protocol.blocks import Block, BlockReader, Step

__all__ = ["ResponseAnswer"]

_PREFIXES: Final = {"reasoning": "rs", "text": "msg", "call": "fc"}
_EVENTS: Final = {
    "reasoning": "response.reasoning_text",
    "text": "response.output_text",
    "call": "response.function_call_arguments",
}


class ResponseAnswer:
    """One response: an item for each block, numbered events about each item.

    An event that only adds text is put together from bytes made once a block.
    """

    def __init__(
        self, body: dict[str, Any], reader: BlockReader, store: Callable[[dict[str, Any], list[int]], None] | None
    ) -> None:
        """Start empty.

        Args:
            body: The response's fields that are known beforehand.
            reader: Reader of the only choice.
            store: Function that stores the finished response and the token ids of the answer, or no ids where they
                differ from the text of the response.
        """
        self._body = body
        self._reader = reader
        self._store = store
        self._token_ids: list[int] = []
        self._number = 0  # number of the next event
        self._ids: list[str] = []  # ids of the items
        self._head = b""  # beginning of the events that add to the open item

    # -- as a stream ------------------------------------------------------------------------------------------------

    def opening(self) -> bytes:
        """Return the events of the response, which is still empty."""
        body = self._body | {"status": "in_progress", "output": [], "usage": None}
        return self._event("response.created", response=body) + self._event("response.in_progress", response=body)

    def feed(self, piece: Piece) -> bytes:
        """Add a piece, and return the events for it."""
        return b"".join([self._of_step(step) for step in self._take(piece)])

    def closing(self, usage: Usage) -> bytes:
        """Return the event with the whole response, and store the response if the client wants that."""
        body = self._end(usage)
        return self._event(f"response.{body['status']}", response=body)

    def failing(self, error: ApiError) -> bytes:
        """Return the events of the error and of the response as far as it got."""
        told = self._event("error", code=error.code, message=error.message, param=error.param)
        failure = {"code": "server_error", "message": error.message}  # OpenAI's list of codes is fixed
        body = self._body | {"status": "failed", "error": failure, "output": self._items(), "usage": None}
        return told + self._event("response.failed", response=body)

    def _of_step(self, step: Step) -> bytes:
        what, block, text = step
        if what == "added":
            number = self._number
            self._number += 1
            return b'%b%d,"delta":%b}\n\n' % (self._head, number, orjson.dumps(text))
        if what == "opened":
            return self._opened(block)
        return self._closed(block)

    def _opened(self, block: Block) -> bytes:
        identity = self._identify(block)
        place = self._place(block)
        kind = f"{_EVENTS[block.kind]}.delta"
        start = {"type": kind, "item_id": identity, **place, **({"logprobs": []} if block.kind == "text" else {})}
        self._head = b'event: %b\ndata: %b,"sequence_number":' % (kind.encode(), orjson.dumps(start)[:-1])
        item = _item(block, identity, "in_progress")
        events = self._event("response.output_item.added", output_index=block.index, item=item)
        if block.kind == "call":
            return events
        return events + self._event("response.content_part.added", item_id=identity, **place, part=_part(block, ""))

    def _closed(self, block: Block) -> bytes:
        identity, place, text = self._ids[block.index], self._place(block), block.text
        done = f"{_EVENTS[block.kind]}.done"
        if block.kind == "call":
            events = self._event(done, item_id=identity, **place, name=block.name, arguments=text)
        else:
            more: dict[str, Any] = {"logprobs": []} if block.kind == "text" else {}
            events = self._event(done, item_id=identity, **place, text=text, **more)
            part = _part(block, text)
            events += self._event("response.content_part.done", item_id=identity, **place, part=part)
        item = _item(block, identity, _status(block))
        return events + self._event("response.output_item.done", output_index=block.index, item=item)

    def _place(self, block: Block) -> dict[str, int]:
        return {"output_index": block.index, **({} if block.kind == "call" else {"content_index": 0})}

    def _event(self, kind: str, **values: Any) -> bytes:
        number = self._number
        self._number += 1
        return typed_event({"type": kind, "sequence_number": number, **values})

    # -- as one body ------------------------------------------------------------------------------------------------

    def keep(self, piece: Piece) -> None:
        """Add a piece for `whole`."""
        self._take(piece)

    def whole(self, usage: Usage) -> bytes:
        """Return the finished response, and store it if the client wants that."""
        return orjson.dumps(self._end(usage))

    def _take(self, piece: Piece) -> list[Step]:
        if self._store is not None:
            self._token_ids += [token.id for token in piece.tokens if token.id is not None]
        return self._reader.feed(piece)

    def _end(self, usage: Usage) -> dict[str, Any]:
        """Return the finished response, and store it if the client wants that."""
        body = self._finished(usage)
        if self._store is not None:
            self._store(body, self._token_ids if self._reader.complete else [])
        return body

    def _finished(self, usage: Usage) -> dict[str, Any]:
        cut = self._reader.finish_reason == "length"
        return self._body | {
            "status": "incomplete" if cut else "completed",
            "completed_at": None if cut else int(time.time()),
            "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
            "output": self._items(),
            "usage": self._usage(usage),
        }

    def _items(self) -> list[dict[str, Any]]:
        return [_item(block, self._identify(block), _status(block)) for block in self._reader.blocks]

    def _identify(self, block: Block) -> str:
        """Return the id of a block's item, which is drawn at the first call."""
        if block.index == len(self._ids):
            self._ids.append(f"{_PREFIXES[block.kind]}_{secrets.token_hex(16)}")
        return self._ids[block.index]

    def _usage(self, usage: Usage) -> dict[str, Any]:
        return {
            "input_tokens": usage.prompt_tokens,
            "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
            "output_tokens": usage.completion_tokens,
            "output_tokens_details": {"reasoning_tokens": self._reader.reasoning_tokens},
            "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        }


def _status(block: Block) -> str:
    return "completed" if block.complete else "incomplete"


def _part(block: Block, text: str) -> dict[str, Any]:
    """Return the only part of a message or of reasoning."""
    if block.kind == "reasoning":
        return {"type": "reasoning_text", "text": text}
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def _item(block: Block, identity: str, status: str) -> dict[str, Any]:
    """Return a block as an item, which is empty while it is in progress."""
    begun = status == "in_progress"
    text = "" if begun else block.text
    if block.kind == "call":
        call = {"call_id": block.call_id, "name": block.name, "arguments": text}
        return {"id": identity, "type": "function_call", "status": status, **call}
    content = [] if begun else [_part(block, text)]
    if block.kind == "reasoning":
        return {"id": identity, "type": "reasoning", "status": status, "summary": [], "content": content}
    return {"id": identity, "type": "message", "status": status, "role": "assistant", "content": content}
