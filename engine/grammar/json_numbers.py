"""Numbers in JSON schemas, in bounds that llguidance keeps exactly and of digits that a double holds; compiles nothing.

It reads every number of a schema as a double, so a bound of 2^53 + 1 would become 2^53; takes no bound from 2^63 on;
and lets a number without bounds have digits without end. Next to read: json_schemas.py, which visits the schemas.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from decimal import Decimal
from typing import Any, Final, TypeGuard

__all__ = ["BOUNDS", "SHARED", "bounded_numbers", "check_constants"]

BOUNDS: Final = ("minimum", "exclusiveMinimum", "maximum", "exclusiveMaximum")
"""Keywords that bound a number."""

_MOST: Final = 2**53 - 1
"""Numbers go so far by default: every integer up to here is exact as a double."""
_FARTHEST: Final = 2**63 - 1024
"""The largest double that llguidance takes as a bound."""
_FINEST: Final = 1e-9
"""The smallest difference of two numbers: with 16 digits before the point, more than a double tells apart."""
_NARROW: Final = 1e-6
"""Ranges narrower than this have as many digits as they need."""
_LOW: Final = BOUNDS[:2]
_ANNOTATIONS: Final = frozenset(("title", "description", "default", "examples", "format", "deprecated"))

SHARED: Final[dict[str, Any]] = {
    "headrace-integer": {"type": "integer", "minimum": -_MOST, "maximum": _MOST},
    "headrace-number": {"type": "number", "minimum": -_MOST, "maximum": _MOST, "multipleOf": _FINEST},
}
"""What integers and numbers without bounds are, as definitions: compiling each anew would take a millisecond or two."""


def check_constants(key: str, value: Any) -> None:
    """Refuse a constant that would be written as another number.

    Args:
        key: `const` or `enum`.
        value: What it holds.

    Raises:
        ValueError: It holds an integer that no double is.
    """
    for number in _numbers(value):
        try:
            near = float(number)
        except OverflowError:
            near = math.inf
        short = isinstance(number, int) and abs(number) < 2**63  # others are written as the shortest text of a double
        if near == math.inf or int(near if short else Decimal(repr(near))) != int(number):
            raise ValueError(f"{key} holds {_shown(number)}, an integer beyond 2^53 that cannot be kept")


def bounded_numbers(schema: dict[str, Any], *, shares: bool) -> dict[str, Any]:
    """Return a schema whose bounds are doubles, and whose numbers have bounds and a finest difference.

    Bounds are rounded inwards, so that what is written satisfies the schema as it was given.

    Args:
        schema: One schema; those inside it are not looked at.
        shares: Whether it may refer to `SHARED` as definitions.

    Raises:
        ValueError: A bound admits only numbers that cannot be written; names the keyword.
    """
    name = f"headrace-{schema.get('type')}"
    if shares and name in SHARED and schema.keys() - _ANNOTATIONS == {"type"}:
        return {"$ref": f"#/$defs/{name}"}
    for key in [key for key in BOUNDS if _is_number(schema.get(key))]:
        schema = _with_double(schema, key)
    kinds = schema.get("type")
    kinds = kinds if isinstance(kinds, list) else [kinds]
    if ("integer" not in kinds and "number" not in kinds) or "const" in schema or "enum" in schema:
        return schema
    low = max((schema[key] for key in _LOW if _is_number(schema.get(key))), default=None)
    high = min((schema[key] for key in BOUNDS[2:] if _is_number(schema.get(key))), default=None)
    if low is None:
        low = -_MOST if high is None or high > -_MOST else -_FARTHEST
        schema = {**schema, "minimum": low}
    if high is None:
        high = _MOST if low < _MOST else _FARTHEST
        schema = {**schema, "maximum": high}
    if "number" in kinds and "multipleOf" not in schema and high - low >= _NARROW:
        schema = {**schema, "multipleOf": _FINEST}
    return schema


def _with_double(schema: dict[str, Any], key: str) -> dict[str, Any]:
    """Return a schema whose bound `key`, if it lies beyond 2^53, is an included double that is no wider."""
    sign, included = (1, "minimum") if key in _LOW else (-1, "maximum")
    bound = sign * schema[key]  # as a lower one
    if abs(bound) <= _MOST:
        return schema
    near = -_FARTHEST if bound < -_FARTHEST else min(bound, 2 * _FARTHEST)
    double = int(float(near))
    if double < near or (double == bound and key != included):  # beyond 2^53 the next double is an integer, too
        double = int(math.nextafter(float(double), math.inf))
    if double > _FARTHEST:
        raise ValueError(f"{key}: {_shown(schema[key])} admits only numbers beyond 2^63, which cannot be kept")
    schema = {name: value for name, value in schema.items() if name != key}
    other = schema.get(included)
    if _is_number(other) and sign * other > double:
        return schema
    return schema | {included: sign * double}


def _numbers(value: Any) -> Iterator[float]:
    """Yield the whole numbers in a value."""
    if _is_number(value) and (isinstance(value, int) or value.is_integer()):
        yield value
    elif isinstance(value, list | dict):
        for each in value.values() if isinstance(value, dict) else value:
            yield from _numbers(each)


def _is_number(value: Any) -> TypeGuard[float]:
    return type(value) in (int, float)


def _shown(number: float) -> str:
    if isinstance(number, float):
        return f"{number:g}"
    return str(number) if abs(number) < 10**40 else "an integer of more than 40 digits"
