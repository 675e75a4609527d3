"""Checks the messages of a chat and copies them for a chat template; never renders or tokenises them."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

from headrace.engine.errors import InvalidParams

__all__ = ["Message", "checked_messages", "check_text", "map_strings"]

Message: TypeAlias = Mapping[str, Any]
"""A message in the form of OpenAI's API: `role`, and `content` as a str or a list of `{"type": "text", "text"}` parts,
and `name` where there is one; in chats with tools also `tool_calls` of an assistant, as `{"id", "type": "function",
"function": {"name", "arguments"}}`, for which `content` may be None, and `tool_call_id` of a tool. Arguments are a
mapping or JSON text; text that is not a JSON object, such as arguments that were cut, stays text. None counts as
absent."""

_MAX_DEPTH = 100  # levels of JSON data in a message: well below Python's own limit
_TEXTS = ("role", "content", "name", "tool_call_id", "reasoning_content")


def checked_messages(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Return copies of `messages` that a template may read.

    Raises:
        InvalidParams: The list is empty, or a message is malformed; names its place.
    """
    if not isinstance(messages, Sequence) or isinstance(messages, str | bytes) or not messages:
        raise InvalidParams("messages: a chat is a list of at least one message", field="messages", value=messages)
    return [_checked(message, f"messages[{index}]") for index, message in enumerate(messages)]


def _checked(message: object, place: str) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        what = f"got {type(message).__name__}" + ("; give its model_dump()" if hasattr(message, "model_dump") else "")
        raise InvalidParams(f"{place}: a message is a mapping of role and content, {what}", field=place, value=message)
    checked = {key: value for key, value in message.items() if value is not None and value != []}
    calls = checked.pop("tool_calls", None)
    if calls is not None and "content" not in checked:
        checked["content"] = ""
    for key in ("role", "content"):
        checked.setdefault(key, None)
    for key in checked:
        field = f"{place}.{key}"
        if key not in _TEXTS:
            raise InvalidParams(f"{field}: a message has {', '.join(_TEXTS)} and tool_calls only", field=field)
        if key == "content" and isinstance(checked[key], Sequence) and not isinstance(checked[key], str | bytes):
            checked[key] = _joined(checked[key], field)
        check_text(checked[key], field)
    if checked["role"] == "developer":  # OpenAI's newer word, which no template knows
        checked["role"] = "system"
    if calls is not None:
        field = f"{place}.tool_calls"
        if not isinstance(calls, Sequence) or not all(map(_is_call, calls)):
            raise InvalidParams(f"{field}: must be a list of calls of functions with arguments", field=field)
        checked["tool_calls"] = map_strings(list(map(_parsed, calls)), lambda text: check_text(text, field), field)
    return checked


def _joined(parts: Sequence[Any], field: str) -> str:
    """Return the texts of a content's parts, a line each.

    Raises:
        InvalidParams: A part is not text; names its place and its type.
    """
    texts = []
    for index, part in enumerate(parts):
        place = f"{field}[{index}]"
        if not isinstance(part, Mapping):
            raise InvalidParams(
                f"{place}: a part is a mapping of type and text, got {type(part).__name__}", field=place, value=part
            )
        if part.get("type") != "text":
            kind = str(part.get("type"))[:40]
            raise InvalidParams(f"{place}: {kind} parts are not supported, only text is", field=place, value=part)
        texts.append(check_text(part.get("text"), f"{place}.text"))
    return "\n".join(texts)


def _is_call(call: object) -> bool:
    function = call.get("function") if isinstance(call, Mapping) else None
    return (
        isinstance(function, Mapping)
        and isinstance(function.get("name"), str)
        and isinstance(function.get("arguments"), Mapping | str)
    )


def _parsed(call: Mapping[str, Any]) -> dict[str, Any]:
    """Return a call with its arguments as a mapping, as templates expect; text that is not a JSON object stays text."""
    function = dict(call["function"])
    if isinstance(function["arguments"], str):
        try:
            arguments = json.loads(function["arguments"] or "{}")
        except (ValueError, RecursionError):
            arguments = None
        if isinstance(arguments, dict):
            function["arguments"] = arguments
    return {**call, "function": function}


def check_text(text: object, field: str) -> str:
    """Return `text` if it is a string that UTF-8 can express.

    Raises:
        InvalidParams: `text` is not such a string; names `field`.
    """
    if not isinstance(text, str):
        raise InvalidParams(f"{field}: must be a string, got {type(text).__name__}", field=field, value=text)
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InvalidParams(
            f"{field}: character {error.start} is half of a surrogate pair, which UTF-8 cannot express", field=field
        ) from None
    return text


def map_strings(value: Any, change: Callable[[str], str], field: str = "messages", depth: int = _MAX_DEPTH) -> Any:
    """Return a copy of plain JSON data in which `change` has replaced every string, keys included.

    Raises:
        InvalidParams: The data nests deeper than `depth`; names `field`.
    """
    if isinstance(value, str):
        return change(value)
    if depth == 0:
        raise InvalidParams(f"{field}: nests deeper than {_MAX_DEPTH}", field=field, limit=_MAX_DEPTH)
    if isinstance(value, Mapping):
        return {
            map_strings(key, change, field, depth - 1): map_strings(part, change, field, depth - 1)
            for key, part in value.items()
        }
    if isinstance(value, Sequence):
        return [map_strings(part, change, field, depth - 1) for part in value]
    return value
