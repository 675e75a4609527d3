"""Grammars of calls whose arguments are written one by one between tags; forced.py makes the rest of an answer.

A string is written as it is there, so the JSON of a schema says nothing of it: its rule is made here, of the schema's
`enum`, `const`, `minLength` and `maxLength`. Other demands on strings, such as `pattern`, are not kept to.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, Final

from headrace.engine.tools import ArgumentTags, CallShape
from headrace.engine.tools.parameters import is_string, resolved

__all__ = ["can_be_tagged", "tagged_call"]

# Keywords of a tool's schema that leave its arguments a plain list of names and schemas.
_PLAIN: Final = frozenset({
    "$defs", "$id", "$schema", "additionalProperties", "definitions", "description", "examples", "properties",
    "required", "strict", "title", "type",
})  # fmt: skip


def can_be_tagged(schema: dict[str, Any]) -> bool:
    """Return whether the arguments of a tool are a plain list of names and schemas."""
    properties, required = schema.get("properties", {}), schema.get("required", [])
    named = isinstance(required, list) and all(isinstance(name, str) and name in properties for name in required)
    return named and schema.keys() <= _PLAIN


def tagged_call(shape: CallShape, name: str, write_json: Callable[[dict[str, Any]], str]) -> list[str]:
    """Return the rules of a call, of which the first is called `name`.

    Args:
        shape: The call, of style `tagged`.
        name: Beginning of the names of all rules.
        write_json: Function that writes the JSON of a schema as part of a rule.
    """
    schema, tags = shape.schema, shape.tags
    assert tags is not None
    required = set(schema.get("required", ()))
    parts, rules = [json.dumps(shape.before)], []
    for place, argument in enumerate(schema.get("properties", {})):
        rule = f"{name}_{place}"
        parts.append(rule if argument in required else f"{rule}?")
        rules += _argument(schema, argument, tags, rule, write_json)
    parts.append(json.dumps(shape.after))
    return [f"{name}: {' '.join(parts)}", *rules]


def _argument(
    schema: dict[str, Any], argument: str, tags: ArgumentTags, rule: str, write_json: Callable[[dict[str, Any]], str]
) -> list[str]:
    before = json.dumps(tags.before + argument + tags.between)
    found = resolved(schema["properties"][argument], schema)
    if not is_string(schema, argument):
        defined: dict[str, Any] = {key: schema[key] for key in ("$defs", "definitions") if key in schema}
        feed = r"/\n?/ " if tags.between.endswith("\n") else ""
        return [f"{rule}: {before} {write_json({**found, **defined})} {feed}{json.dumps(tags.after + tags.last)}"]
    listed = found.get("enum", [found["const"]] if "const" in found else [])
    if listed:
        values = " | ".join(json.dumps(value) for value in listed)
        return [f"{rule}: {before} ({values}) {json.dumps(tags.after + tags.last)}"]
    least, most = found.get("minLength", 0), found.get("maxLength", "")
    return [
        f"{rule}: {before} {rule}_text {json.dumps(tags.last)}",
        f"{rule}_text[suffix={json.dumps(tags.after)}]: /(?s:.{{{least},{most}}})/",
    ]
