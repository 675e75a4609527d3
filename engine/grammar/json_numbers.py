"""Gives numbers in JSON schemas bounds that llguidance keeps exactly, and digits that a double holds; compiles nothing.

llguidance reads every number of a schema as a double, so a bound of 2^53 + 1 would become 2^53; it accepts no bound
from 2^63 on; and it lets a number without bounds have digits without end. Next to read: json_schemas.py, which visits
the schemas.
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
"""Default bound of numbers: every integer up to it is exact as a double."""
_FARTHEST: Final = 2**63 - 1024
"""The largest double that llguidance accepts as a bound."""
_FINEST: Final = 1e-9
"""Smallest difference of two numbers: with 16 digits before the point, more than a double tells apart."""
_NARROW: Final = 1e-6
"""Width of a range below which numbers have as many digits as they need."""
_LOW: Final = BOUNDS[:2]
_ANNOTATIONS: Final = frozenset(("title", "description", "default", "examples", "format", "deprecated"))

SHARED: Final[dict[str, Any]] = {
    "headrace-integer": {"type": "integer", "minimum": -_MOST, "maximum": _MOST},
    "headrace-number": {"type": "number", "minimum": -_MOST, "maximum": _MOST, "multipleOf": _FINEST},
}
"""Definitions of integers and numbers without bounds: compiling each anew would take a millisecond or two."""


def check_constants(key: str, value: Any) -> None:
    """Refuse a constant that would be written as another number.

    Args:
        key: `const` or `enum`.
        value: The constant or the list of constants.

    Raises:
        ValueError: `value` holds an integer that is not a double.
    """
    for number in _numbers(value):
        try:
            near = float(number)
        except OverflowError:
            near = math.inf
        short = isinstance(number, int) and abs(number) < 2**63  # others become the shortest text of a double
        if near == math.inf or int(near if short else Decimal(repr(near))) != int(number):
            raise ValueError(f"{key} holds {_shown(number)}, an integer beyond 2^53 that cannot be kept")


def bounded_numbers(schema: dict[str, Any], *, shares: bool) -> dict[str, Any]:
    """Return a schema whose bounds are doubles, and whose numbers have bounds and a smallest difference.

    Bounds are rounded inwards, so that the numbers that are written satisfy the original schema.

    Args:
        schema: One schema; schemas inside it are not changed.
        shares: Whether the schema may refer to `SHARED` as definitions.

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
    bound = sign * schema[key]  # as a lower bound
    if abs(bound) <= _MOST:
        return schema
    near = -_FARTHEST if bound < -_FARTHEST else min(bound, 2 * _FARTHEST)
    double = int(float(near))
    if double < near or (double == bound and key != included):  # beyond 2^53 the next double is an integer as well
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
