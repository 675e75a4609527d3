"""Items of responses as they are listed, stored, and read back for the next turn; keeps nothing itself."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from typing import Any

import orjson
from pydantic import TypeAdapter

from headrace.server.protocol.forms.responses import CallItem, Item, MessageItem, OutputItem, ReasoningItem

__all__ = ["following_items", "listed_items", "read_items"]

_ITEMS: TypeAdapter[list[Item]] = TypeAdapter(list[Item])


def listed_items(items: Sequence[Item]) -> list[dict[str, Any]]:
    """Return input items as `GET /v1/responses/{response_id}/input_items` shows them, each with an id."""
    return [_listed(item) for item in items]


def following_items(items: bytes, body: bytes) -> bytes:
    """Return the items that come before the input of the turn after a response, as a JSON list.

    Args:
        items: Input items of the response, as a JSON list.
        body: The response as JSON.
    """
    return orjson.dumps([*orjson.loads(items), *orjson.loads(body)["output"]])


def read_items(items: bytes) -> list[Item]:
    """Return the items of a JSON list that was stored."""
    return _ITEMS.validate_python(orjson.loads(items))


def _listed(item: Item) -> dict[str, Any]:
    """Return an item with a new id; the text is one part, since parts were joined when the item was read."""
    if isinstance(item, MessageItem):
        return _identified("msg", "message", role=item.role, content=[_part(item)])
    if isinstance(item, CallItem):
        return _identified("fc", "function_call", call_id=item.call_id, name=item.name, arguments=item.arguments)
    if isinstance(item, OutputItem):
        return _identified("fco", "function_call_output", call_id=item.call_id, output=item.output)
    assert isinstance(item, ReasoningItem)
    text = item.content or item.summary or ""
    return _identified("rs", "reasoning", summary=[], content=[{"type": "reasoning_text", "text": text}])


def _part(item: MessageItem) -> dict[str, Any]:
    if item.role == "assistant":
        return {"type": "output_text", "text": item.content, "annotations": [], "logprobs": []}
    return {"type": "input_text", "text": item.content}


def _identified(prefix: str, kind: str, **values: Any) -> dict[str, Any]:
    return {"id": f"{prefix}_{secrets.token_hex(16)}", "type": kind, "status": "completed", **values}
