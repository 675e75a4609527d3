"""Rewrites JSON schemas so that llguidance follows their meaning, and refuses others; compiles nothing.

llguidance reads a class of characters with all control characters as one with quotes and backslashes, so that `[^"]`
would admit a quote; drops the characters of a fixed text that can only be written as `\\u0001`; and admits 2 between 2,
excluded, and 2.5. It also reads patterns in Rust's syntax, where a class may hold others. Next to read: compiler.py,
which compiles the result.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from functools import partial
from typing import Any, Final

from headrace.engine.grammar.json_numbers import BOUNDS, SHARED, bounded_numbers, check_constants
from headrace.engine.grammar.json_values import VALUE, VALUES, described
from headrace.engine.grammar.schema_walk import CONSTANTS, combines, mapped_schemas

__all__ = ["JSON_STYLE", "closed_schema", "exact_grammar", "exact_schema", "without_others"]

# Compact, as models write JSON on one line: free white space would let a model write nothing else. Without \u a text
# has one spelling, so that no property escapes its own schema under an escaped name.
JSON_STYLE: Final[Any] = {
    "whitespace_flexible": False,
    "item_separator": ", ",
    "key_separator": ": ",
    "json_allowed_escapes": 'nrbtf\\"',
}

_SHARED: Final = {**SHARED, VALUE: VALUES}
_OTHERS: Final = frozenset(("additionalProperties", "patternProperties", "propertyNames", "minProperties"))
"""Keywords that concern properties without a name."""
_UNWRITTEN: Final = frozenset({*range(0x20), 0x7F}.difference(map(ord, "\b\f\n\r\t")))
"""Characters that can only be written with `\\u`, which no format here admits."""
_PARTS: Final = re.compile(
    r"\\[xu]\{[^}]{0,9}\}|\\x[0-9a-fA-F]{2}|\\u[0-9a-fA-F]{4}|\\U[0-9a-fA-F]{8}|\\[pP]\{[^}]{0,64}\}|\\[pP].|\\.|.",
    re.S,
)
_CODE: Final = re.compile(r"\\[xuU]\{?([0-9a-fA-F]+)\}?")
_CONTROLS: Final = re.compile(r"\\p\{?(.*[=:])?[\s_-]*(?i:(is)?(c|cc|cntrl|control|other))[\s_-]*\}?")
_NEAR: Final = 1e-9
_OPERATORS: Final = frozenset("&-~")


def exact_grammar(source: str) -> str:
    """Return a grammar in Lark's syntax with the schemas in it made exact.

    Raises:
        ValueError: A schema in it cannot be followed exactly.
    """
    parts, at = [], 0
    for found in re.finditer(r"%json\s*(?=\{)", source):
        if found.start() < at:  # inside the previous schema
            continue
        try:
            schema, end = json.JSONDecoder().raw_decode(source, found.end())
        except ValueError:  # a string or a comment, or an error that llguidance reports
            continue
        parts += [source[at : found.end()], json.dumps(exact_schema(schema), ensure_ascii=False)]
        at = end
    return "".join([*parts, source[at:]])


def closed_schema(schema: Any) -> Any:
    """Return a JSON schema whose objects have exactly the named properties, as OpenAI's strict mode demands.

    Objects without named properties, such as those of a `dict`, stay as they are.
    """
    return mapped_schemas(schema, _closed)


def _closed(schema: dict[str, Any]) -> dict[str, Any]:
    if not isinstance(schema.get("properties"), dict):
        return schema
    return schema | {"required": list(schema["properties"]), "additionalProperties": False}


def without_others(schema: dict[str, Any]) -> dict[str, Any]:
    """Return a schema whose objects have only named properties, unless the schema says something of others.

    Every value that the result admits satisfies the original schema. If a value has to satisfy several schemas, the
    schema stays as it is, since one of them may name what another leaves out.
    """
    closed: dict[str, Any] = schema if combines(schema) else mapped_schemas(schema, _without_others)
    return closed


def _without_others(schema: dict[str, Any]) -> dict[str, Any]:
    named, required = schema.get("properties"), schema.get("required", [])
    if not isinstance(named, dict) or not _OTHERS.isdisjoint(schema) or not isinstance(required, list):
        return schema
    if not all(isinstance(name, str) and name in named for name in required):
        return schema
    return schema | {"additionalProperties": False}


def exact_schema(schema: Any) -> Any:
    """Return a schema made exact.

    Raises:
        ValueError: The schema cannot be followed exactly.
    """
    if not isinstance(schema, dict) or not isinstance(schema.get("$defs", {}), dict) or '"$id"' in json.dumps(schema):
        return mapped_schemas(schema, partial(_exact, shares=False))
    made = schema if combines(schema) else mapped_schemas(schema, described)
    made = mapped_schemas(made, partial(_exact, shares=True))
    written = json.dumps(made)
    used = {name: each for name, each in _SHARED.items() if f'"#/$defs/{name}"' in written}
    if VALUE in used:
        used = _SHARED
    return {**made, "$defs": {**made.get("$defs", {}), **used}} if used else made


def _exact(schema: dict[str, Any], shares: bool) -> dict[str, Any]:
    """Return one schema made exact; with `shares` it may refer to `_SHARED`."""
    _check_counted(schema)
    made = {key: _exact_keyword(key, value) for key, value in schema.items()}
    return bounded_numbers(_exact_range(made), shares=shares)


def _check_counted(schema: dict[str, Any]) -> None:
    """Refuse `minProperties` for names that may be written twice, since readers of the object take equal names for
    one."""
    least, required = schema.get("minProperties"), schema.get("required")
    is_free = schema.get("additionalProperties") is not False or bool(schema.get("patternProperties"))
    if is_free and isinstance(least, int) and least > max(1, len(required) if isinstance(required, list) else 0):
        raise ValueError(f"minProperties: {least} of names that are not required, which may be the same one")


def _exact_keyword(key: str, value: Any) -> Any:
    if key == "patternProperties" and isinstance(value, dict):
        return {_exact_pattern(pattern): each for pattern, each in value.items()}
    if key == "pattern" and isinstance(value, str):
        return _exact_pattern(value)
    if key in CONSTANTS:
        check_constants(key, value)
        for text in _texts(value):
            if not _UNWRITTEN.isdisjoint(map(ord, text)):
                raise ValueError(f"{key} holds a control character, which cannot be written here")
    return value


def _exact_range(schema: dict[str, Any]) -> dict[str, Any]:
    """Return a schema in which an excluded integer bound of a range shorter than 1 becomes an included number near
    it."""
    numbers = {key: schema[key] for key in BOUNDS if type(schema.get(key)) in (int, float)}
    bounds = {key: value for key, value in numbers.items() if abs(value) < 2**53}  # beyond there are no fractions
    low = max((bounds[key] for key in ("minimum", "exclusiveMinimum") if key in bounds), default=-math.inf)
    high = min((bounds[key] for key in ("maximum", "exclusiveMaximum") if key in bounds), default=math.inf)
    if not 0 < high - low < 1:
        return schema
    for key, included, end, sign in (
        ("exclusiveMinimum", "minimum", low, 1),
        ("exclusiveMaximum", "maximum", high, -1),
    ):
        if bounds.get(key) == end == math.floor(end):
            nearest = min((high - low) / 2, _NEAR * max(1.0, abs(end)))
            schema = {name: value for name, value in schema.items() if name != key} | {included: end + sign * nearest}
    return schema


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, list | dict):
        for each in value.values() if isinstance(value, dict) else value:
            yield from _texts(each)


def _exact_pattern(pattern: str) -> str:
    """Return the pattern with plain classes, none of which has all control characters, since those are never
    written."""
    parts = _PARTS.findall(pattern)
    made: list[str] = []
    begin = 0  # index in `made` of the first part of the open class; 0 outside a class
    negated = False
    for place, part in enumerate(parts):
        following = parts[place + 1] if place + 1 < len(parts) else ""
        if not begin:
            _check_writable(part)
            if part == "[":
                begin, negated = len(made) + 1, following == "^"
        elif negated and len(made) == begin:
            part = r"^\x00"
        elif len(made) == begin + negated and part in "]-":  # a plain character, as in other dialects
            part = "\\" + part
        elif part == "]":
            begin = 0
        elif part == "[" or (part in _OPERATORS and made[-1] == part):
            part = "\\" + part
        elif not negated:
            _check_writable(part, is_range="-" in (made[-1], following))
            part = r"\x01\x02" if _code_of(part) == 0 else part
        made.append(part)
    return "".join(made)


def _check_writable(part: str, *, is_range: bool = False) -> None:
    """Refuse a part of a pattern that stands for control characters; at the end of a range they may be left out.

    Raises:
        ValueError: The part stands for them.
    """
    if (_code_of(part) in _UNWRITTEN and not is_range) or _CONTROLS.fullmatch(part):
        raise ValueError(f"a pattern asks for control characters with {part!r}, which cannot be written here")


def _code_of(part: str) -> int | None:
    """Return the character code that a part stands for; None if it may be any of several."""
    if found := _CODE.fullmatch(part):
        return int(found[1], 16)
    if part in (r"\a", r"\v"):
        return 0x07 if part == r"\a" else 0x0B
    return ord(part) if len(part) == 1 else None
