"""Random JSON schemas in the style of those that applications publish: nested, bounded, with references; no tests."""

from __future__ import annotations

import random
from typing import Any

__all__ = ["random_schema"]

_NAMES = ["id", "name", "tags", "unit price", "größe", 'say "hi"', "a/b", "is_active", "items", "address"]
_PATTERNS = ["^[a-c]{1,3}$", "^\\d{4}-\\d{2}$", "^(yes|no)$", "^x?[A-Z]+$"]


def random_schema(seed: int) -> dict[str, Any]:
    """The schema of `seed`; whatever it admits is short, but for a pattern or a number."""
    chance = random.Random(seed)
    schema = _any(chance, depth=3)
    if chance.random() < 0.2:
        schema = {"type": "object", "properties": {"first": {"$ref": "#/$defs/part"}, "rest": schema}}
        schema |= {"required": ["first"], "additionalProperties": False, "$defs": {"part": _any(chance, depth=1)}}
    return schema


def _any(chance: random.Random, depth: int) -> dict[str, Any]:
    makers = [_string, _integer, _number, _fixed]
    if depth:
        makers += [_object, _object, _object, _array, _union]
    return chance.choice(makers)(chance, depth)


def _object(chance: random.Random, depth: int) -> dict[str, Any]:
    names = chance.sample(_NAMES, chance.randint(0, 4))
    return {
        "type": "object",
        "properties": {name: _any(chance, depth - 1) for name in names},
        "required": [name for name in names if chance.random() < 0.7],
        "additionalProperties": False,
    }


def _array(chance: random.Random, depth: int) -> dict[str, Any]:
    fewest = chance.randint(0, 2)
    return {
        "type": "array",
        "items": _any(chance, depth - 1),
        "minItems": fewest,
        "maxItems": fewest + chance.randint(0, 2),
    }


def _union(chance: random.Random, depth: int) -> dict[str, Any]:
    return {"anyOf": [_any(chance, depth - 1) for _ in range(chance.randint(1, 3))]}


def _string(chance: random.Random, depth: int) -> dict[str, Any]:
    kind = chance.random()
    if kind < 0.2:
        return {"type": "string", "pattern": chance.choice(_PATTERNS)}
    if kind < 0.4:
        return {"type": "string", "format": chance.choice(["date", "time", "uuid", "ipv4", "date-time"])}
    fewest = chance.randint(0, 3)
    return {"type": "string", "minLength": fewest, "maxLength": fewest + chance.randint(0, 9)}


def _integer(chance: random.Random, depth: int) -> dict[str, Any]:
    least = chance.randint(-50, 1000)
    bounds = {"minimum": least, "maximum": least + chance.randint(0, 10**6)}
    return {"type": "integer"} | {name: value for name, value in bounds.items() if chance.random() < 0.7}


def _number(chance: random.Random, depth: int) -> dict[str, Any]:
    return {"type": "number"} | chance.choice([{}, {"minimum": 0}, {"exclusiveMinimum": -1.5, "maximum": 12.25}])


def _fixed(chance: random.Random, depth: int) -> dict[str, Any]:
    values: list[Any] = [None, True, False, 0, -3, 2.5, "", "a b", "\u00fc\n", "\U0001f642"]
    return chance.choice(
        [
            {"type": "boolean"},
            {"type": "null"},
            {"const": chance.choice(values)},
            {"enum": chance.sample(values, chance.randint(1, 4))},
            {"type": ["integer", "null"], "maximum": 9},
        ]
    )
