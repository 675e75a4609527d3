"""Checks and copies the values that a request gives to a chat template, such as `enable_thinking`; never renders."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any, Final

from headrace.engine.errors import InvalidParams
from headrace.engine.intake.messages import check_text, map_strings

__all__ = ["checked_template_kwargs"]

_FIELD: Final = "chat_template_kwargs"
_MAX_SIZE: Final = 16_384
_MAX_DEPTH: Final = 16
_RESERVED: Final = frozenset(
    ("messages", "tools", "documents", "add_generation_prompt", "continue_final_message", "chat_template", "tokenize")
)
"""Names whose values the engine sets: a request gives them by other fields, or not at all."""


def checked_template_kwargs(values: object) -> dict[str, Any]:
    """Copy values for a chat template.

    Args:
        values: Plain JSON by name. A name that the template does not read changes nothing.

    Raises:
        InvalidParams: A name is not an identifier or is the engine's, a value is not plain JSON, or the whole is too
            long or nests too deep; names `chat_template_kwargs` or the name in it.
    """
    if not isinstance(values, Mapping):
        raise InvalidParams(f"{_FIELD}: must be values by name, got {type(values).__name__}", field=_FIELD)
    for name in values:
        if not isinstance(name, str) or not name.isidentifier() or name.startswith("_"):
            raise InvalidParams(f"{_FIELD}: names are those of variables in a template, got {name!r:.80}", field=_FIELD)
        if name in _RESERVED or name.endswith("_token"):
            field = f"{_FIELD}.{name}"
            raise InvalidParams(f"{field}: cannot be changed by a request", field=field)
    copied: dict[str, Any] = map_strings(values, lambda text: check_text(text, _FIELD), _FIELD, _MAX_DEPTH)
    left: list[Any] = [copied]
    while left:
        part = left.pop()
        if isinstance(part, dict | list):
            left += part.values() if isinstance(part, dict) else part
        elif not isinstance(part, str | int | None) and not (isinstance(part, float) and math.isfinite(part)):
            raise InvalidParams(f"{_FIELD}: values are plain JSON, got {type(part).__name__}", field=_FIELD)
    if (size := len(json.dumps(copied))) > _MAX_SIZE:
        message = f"{_FIELD}: may have {_MAX_SIZE} characters as JSON, got {size}"
        raise InvalidParams(message, field=_FIELD, value=size, limit=_MAX_SIZE)
    return copied
