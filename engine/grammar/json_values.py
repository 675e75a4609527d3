"""Defines the values that a JSON schema leaves free, with numbers of bounded digits; compiles nothing.

llguidance lets a number in a free value have digits without end, as json_numbers.py describes.
"""

from __future__ import annotations

from typing import Any, Final

from headrace.engine.grammar.schema_walk import UNBINDING

__all__ = ["VALUE", "VALUES", "described"]

VALUE: Final = "headrace-value"
"""Name of the definition of any value."""
_ANY: Final = {"$ref": f"#/$defs/{VALUE}"}
VALUES: Final[dict[str, Any]] = {
    "anyOf": [
        {"type": "null"},
        {"type": "boolean"},
        {"$ref": "#/$defs/headrace-number"},
        {"type": "string"},
        {"type": "array", "items": _ANY},
        {"type": "object", "additionalProperties": _ANY},
    ]
}
"""The definition of any value."""

_TYPES: Final = ("null", "boolean", "number", "string", "array", "object")
_TYPED: Final = frozenset(("type", "const", "enum", "anyOf", "$ref"))


def described(schema: dict[str, Any]) -> dict[str, Any]:
    """Return a schema whose free values refer to the definition `VALUE`; schemas inside it are not changed.

    Args:
        schema: One schema of a whole in which no value has to satisfy two.
    """
    if not schema.keys() - UNBINDING:
        return schema | _ANY
    if _TYPED.isdisjoint(schema):
        schema = schema | {"type": list(_TYPES)}
    kinds = schema.get("type")
    kinds = kinds if isinstance(kinds, list) else [kinds]
    more: dict[str, Any] = {}
    if "object" in kinds and schema.get("additionalProperties", True) is True:
        more["additionalProperties"] = _ANY
    if "array" in kinds and schema.get("items", True) is True:
        more["items"] = _ANY
    for key in ("properties", "patternProperties"):
        if isinstance(schema.get(key), dict):
            more[key] = {name: _ANY if each is True else each for name, each in schema[key].items()}
    return schema | more
