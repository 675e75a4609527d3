"""Walks over the schemas inside a JSON schema; knows the places of schemas, and nothing of their meaning."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

__all__ = ["CONSTANTS", "UNBINDING", "combines", "mapped_schemas"]

_ANNOTATIONS: Final = frozenset(
    ("title", "description", "default", "examples", "deprecated", "readOnly", "writeOnly", "$comment", "$schema")
)
UNBINDING: Final = _ANNOTATIONS | {"$defs", "definitions", "x-guidance"}
"""Keywords beside which a schema admits every value."""
CONSTANTS: Final = frozenset(("const", "enum"))
"""Keywords that hold values instead of schemas."""

_NAMED: Final = frozenset(("properties", "patternProperties", "$defs", "definitions"))
_UNREAD: Final = frozenset(("default", "examples", "required", "x-guidance"))
_COMBINING: Final = frozenset(
    ("allOf", "oneOf", "not", "if", "then", "else", "dependentSchemas", "unevaluatedProperties", "unevaluatedItems")
)
_ELSEWHERE: Final = frozenset(("$id", "id", "$anchor", "$dynamicAnchor", "$dynamicRef", "$recursiveRef"))
_ALONE: Final = frozenset(("anyOf", "$ref"))


def mapped_schemas(schema: Any, change: Callable[[dict[str, Any]], dict[str, Any]]) -> Any:
    """Return a schema in which `change` has replaced every schema, the innermost ones first."""
    if isinstance(schema, list):
        return [mapped_schemas(each, change) for each in schema]
    if not isinstance(schema, dict):
        return schema
    return change({key: _mapped_keyword(key, value, change) for key, value in schema.items()})


def _mapped_keyword(key: str, value: Any, change: Callable[[dict[str, Any]], dict[str, Any]]) -> Any:
    if key in _NAMED and isinstance(value, dict):
        return {name: mapped_schemas(each, change) for name, each in value.items()}
    return value if key in CONSTANTS or key in _UNREAD else mapped_schemas(value, change)


def combines(schema: Any) -> bool:
    """Return whether a value may have to satisfy two schemas inside this one, or a schema may have a name of its own.

    If so, one schema may describe the properties of an object that another leaves open.
    """
    return any(
        not _COMBINING.isdisjoint(each)
        or any(isinstance(each.get(key), str) for key in _ELSEWHERE)
        or (not _ALONE.isdisjoint(each) and len(each.keys() - UNBINDING) > 1)
        for each in _schemas(schema)
    )


def _schemas(schema: Any) -> list[dict[str, Any]]:
    """Return every schema in a schema."""
    found: list[dict[str, Any]] = []

    def seen(each: dict[str, Any]) -> dict[str, Any]:
        found.append(each)
        return each

    mapped_schemas(schema, seen)
    return found
