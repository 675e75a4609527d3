"""Grammars of calls whose arguments are written one by one, not as one JSON object; forced.py makes the rest.

A string between tags or marks is written as it is there, so the JSON of a schema says nothing of it: its rule is made
here, of the schema's `enum`, `const`, `minLength` and `maxLength`. Other demands on such strings, such as `pattern`,
are not kept to. Gemma's values, which have marks at any depth, are made by `_Marked`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from typing import Any, Final, TypeAlias

from headrace.engine.tools import ArgumentTags, CallShape
from headrace.engine.tools.parameters import is_string, resolved

__all__ = ["can_be_written", "written_call"]

WriteJson: TypeAlias = Callable[[dict[str, Any]], str]
"""Writes the JSON of a schema as part of a rule."""

# Keywords of a tool's schema that leave its arguments a plain list of names and schemas.
_PLAIN: Final = frozenset({
    "$defs", "$id", "$schema", "additionalProperties", "definitions", "description", "examples", "properties",
    "required", "strict", "title", "type",
})  # fmt: skip
_SAYS_NOTHING: Final = frozenset({
    "$comment", "$defs", "default", "definitions", "deprecated", "description", "examples", "format", "pattern",
    "readOnly", "title", "writeOnly",
})  # fmt: skip
"""Keywords that are left unread in a value between marks."""
_NUMBERS: Final = frozenset({"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"})
_OF_KINDS: Final[dict[str, frozenset[str]]] = {
    "string": frozenset({"minLength", "maxLength"}),
    "integer": _NUMBERS,
    "number": _NUMBERS,
    "array": frozenset({"items", "minItems", "maxItems"}),
    "object": frozenset({"properties", "required", "additionalProperties"}),
}
"""Keywords that are kept to, by the type of value that they concern."""
_KEYWORD: Final = re.compile(r"[A-Za-z0-9_]+")
_FUNCTION: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_.-]*")
_BARE: Final = re.compile(r'[^{}\[\],"<>\n\r: ][^{}\[\],"<>\n\r:]*')
_MARK: Final = '<|"|>'


def can_be_written(shape: CallShape) -> bool:
    """Return whether a grammar can describe the arguments of a call, in the style that it has."""
    schema = shape.schema
    properties, required = schema.get("properties", {}), schema.get("required", [])
    named = isinstance(required, list) and all(isinstance(name, str) and name in properties for name in required)
    if not named or not schema.keys() <= _PLAIN:
        return False
    if shape.style == "keywords" and not (_FUNCTION.fullmatch(shape.name) and all(map(_KEYWORD.fullmatch, properties))):
        return False
    try:
        written_call(shape, "call", json.dumps)
    except ValueError:
        return False
    return True


def written_call(shape: CallShape, name: str, write_json: WriteJson) -> list[str]:
    """Return the rules of a call, of which the first is called `name`.

    Args:
        shape: The call, of any style but `json`.
        name: Beginning of the names of all rules.
        write_json: Function that writes the JSON of a schema as part of a rule.

    Raises:
        ValueError: A schema asks for what no rule here says, or is none.
    """
    schema = shape.schema
    properties, required = schema.get("properties", {}), set(schema.get("required", ()))
    if shape.style == "tagged":
        parts, rules = [], []
        assert shape.tags is not None
        for place, argument in enumerate(properties):
            rule = f"{name}_{place}"
            parts.append(rule if argument in required else f"{rule}?")
            rules += _tagged(schema, argument, shape.tags, rule, write_json)
    elif shape.style == "marked":
        marked = _Marked(schema, name, write_json)
        parts, rules = [marked.fields(properties, required)], marked.rules
    else:
        values = [
            (f"{json.dumps(f'{each}=')} {_inner(schema, properties[each], write_json)}", each in required)
            for each in properties
        ]
        rules = []
        parts = [_separated(values, ", ", f"{name}_a", rules)]
    return [f"{name}: {' '.join([json.dumps(shape.before), *parts, json.dumps(shape.after)])}", *rules]


def _inner(root: dict[str, Any], schema: object, write_json: WriteJson) -> str:
    """Return the JSON of a schema within another, whose definitions it may refer to."""
    defined: dict[str, Any] = {key: root[key] for key in ("$defs", "definitions") if key in root}
    return write_json({**resolved(schema, root), **defined})


def _tagged(schema: dict[str, Any], argument: str, tags: ArgumentTags, rule: str, write_json: WriteJson) -> list[str]:
    before = json.dumps(tags.before + argument + tags.between)
    found = resolved(schema["properties"][argument], schema)
    if not is_string(schema, argument):
        feed = r"/\n?/ " if tags.between.endswith("\n") else ""
        return [f"{rule}: {before} {_inner(schema, found, write_json)} {feed}{json.dumps(tags.after + tags.last)}"]
    listed = found.get("enum", [found["const"]] if "const" in found else [])
    if listed:
        values = " | ".join(json.dumps(value) for value in listed)
        return [f"{rule}: {before} ({values}) {json.dumps(tags.after + tags.last)}"]
    return [f"{rule}: {before} {rule}_text {json.dumps(tags.last)}", _text(f"{rule}_text", found, tags.after)]


def _text(rule: str, schema: dict[str, Any], end: str) -> str:
    """Return the rule of a text as long as a schema says, and of what stands behind it."""
    least, most = _count(schema, "minLength", 0), _count(schema, "maxLength", "")
    return f"{rule}[suffix={json.dumps(end)}]: /(?s:.{{{least},{most}}})/"


def _count(schema: dict[str, Any], keyword: str, default: int | str) -> int | str:
    """Return an integer of a schema, or `default`, as it may stand in a rule."""
    if keyword not in schema:
        return default
    value = schema[keyword]
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise ValueError(keyword)
    return value


def _separated(parts: Sequence[tuple[str, bool]], separator: str, name: str, rules: list[str]) -> str:
    """Return the name of a rule of `parts`, each with whether it must be there, and add it and its own to `rules`."""
    first, rest = f"{name}_none", f"{name}_none"
    rules.append(f'{first}: ""')
    for place, (part, is_required) in reversed(list(enumerate(parts))):
        own = f"{name}_{place}"
        rules.append(f"{own}: {part}")
        begins = f"{own} {rest}" + ("" if is_required else f" | {first}")
        rules += [
            f"{own}_first: {begins}",
            f"{own}_rest: ({json.dumps(separator)} {own}){'' if is_required else '?'} {rest}",
        ]
        first, rest = f"{own}_first", f"{own}_rest"
    return first


class _Marked:
    """Rules of values as Gemma 4 writes them: strings between marks, and names of properties bare."""

    def __init__(self, root: dict[str, Any], name: str, write_json: WriteJson) -> None:
        self.rules: list[str] = []
        self._root, self._name, self._write_json = root, name, write_json
        self._referred: dict[str, str] = {}
        self._any = ""

    def fields(self, properties: dict[str, Any], required: set[str]) -> str:
        """Return the name of a rule of properties, in the order of their names, as the model's template has them."""
        parts = []
        for key in sorted(properties, key=str.lower):
            if not _BARE.fullmatch(key):
                raise ValueError(key)
            parts.append((f"{json.dumps(key + ':')} {self._value(properties[key])}", key in required))
        return _separated(parts, ",", self._new(), self.rules)

    def _new(self) -> str:
        return f"{self._name}_m{len(self.rules)}"

    def _rule(self, written: str) -> str:
        """Return the name of a rule for what may stand in several places."""
        rule = self._new()
        self.rules.append(f"{rule}: {written}")
        return rule

    def _value(self, schema: object) -> str:
        """Return what stands in a rule for a value."""
        if schema is True:
            return self._anything()
        if not isinstance(schema, dict):
            raise ValueError("false")
        if "$ref" in schema:
            return self._reference(schema)
        said = schema.keys() - _SAYS_NOTHING
        if "const" in schema or "enum" in schema:
            listed = [schema["const"]] if "const" in schema else _listed(schema, "enum")
            return f"({' | '.join(json.dumps(_literal(value)) for value in listed)})"
        if "anyOf" in schema:
            self._check(said, {"anyOf"})
            return f"({' | '.join(map(self._value, _listed(schema, 'anyOf')))})"
        kind = schema.get("type")
        if isinstance(kind, list):
            kinds = (self._of_kind(each, schema, _said_of(each, said)) for each in _listed(schema, "type"))
            return f"({' | '.join(kinds)})"
        if kind is None:
            kind = "object" if "properties" in schema else "array" if "items" in schema else ""
        return self._of_kind(kind, schema, said - {"type"})

    def _of_kind(self, kind: object, schema: dict[str, Any], said: set[str]) -> str:
        self._check(said, _OF_KINDS.get(str(kind), frozenset()))
        if kind == "string":
            rule = self._new()
            self.rules.append(_text(rule, schema, _MARK))
            return f"{json.dumps(_MARK)} {rule}"
        if kind == "array":
            return self._list(schema)
        if kind == "object":
            return self._object(schema)
        if kind in ("integer", "number", "boolean", "null"):
            return self._write_json({"type": kind, **{key: schema[key] for key in said}})
        if kind:
            raise ValueError(str(kind))
        return self._anything()

    def _list(self, schema: dict[str, Any]) -> str:
        least, most = int(_count(schema, "minItems", 0)), _count(schema, "maxItems", "")
        if most == 0:
            return '"[]"'
        item = self._rule(self._value(schema.get("items", True)))
        more = f'("," {item}){{{max(least - 1, 0)},{most - 1 if isinstance(most, int) else most}}}'
        return f'"[" ({item} {more}){"" if least else "?"} "]"'

    def _object(self, schema: dict[str, Any]) -> str:
        properties, required = schema.get("properties", {}), schema.get("required", [])
        if (
            not isinstance(properties, dict)
            or not isinstance(required, list)
            or any(not isinstance(key, str) or key not in properties for key in required)
        ):
            raise ValueError("properties")
        others = schema.get("additionalProperties", True)
        if properties or others is False:
            return f'"{{" {self.fields(properties, set(required))} "}}"'
        return self._map(self._value(others))

    def _reference(self, schema: dict[str, Any]) -> str:
        self._check(schema.keys() - _SAYS_NOTHING, {"$ref"})
        reference = str(schema["$ref"])
        if reference not in self._referred:
            rule = self._referred[reference] = f"{self._name}_r{len(self._referred)}"
            self.rules.append(f"{rule}: {self._value(resolved(schema, self._root))}")
        return self._referred[reference]

    def _anything(self) -> str:
        """Return the name of the rule of any value at all."""
        if not self._any:
            self._any = f"{self._name}_any"
            text = self._value({"type": "string"})
            plain = self._write_json({"type": ["number", "boolean", "null"]})
            lists = f'"[" ({self._any} ("," {self._any})*)? "]"'
            self.rules.append(f"{self._any}: {text} | {plain} | {lists} | {self._map(self._any)}")
        return self._any

    def _map(self, value: str) -> str:
        key, value = r"/[A-Za-z0-9_]+/", self._rule(value)
        return f'"{{" ({key} ":" {value} ("," {key} ":" {value})*)? "}}"'

    def _check(self, said: set[str], known: set[str] | frozenset[str]) -> None:
        if not said <= known:
            raise ValueError(", ".join(sorted(said - known)))


def _listed(schema: dict[str, Any], keyword: str) -> list[Any]:
    value = schema[keyword]
    if not isinstance(value, list) or not value:
        raise ValueError(keyword)
    return value


def _said_of(kind: object, said: set[str]) -> set[str]:
    """Return the keywords of a schema of several types that concern one of them."""
    others = frozenset[str]().union(*(words for each, words in _OF_KINDS.items() if each != kind)) - _OF_KINDS.get(
        str(kind), frozenset()
    )
    return said - {"type"} - others


def _literal(value: object) -> str:
    """Return a value of a schema's `enum` or `const` as Gemma 4 writes it."""
    if isinstance(value, str):
        if _MARK in value:
            raise ValueError(value)
        return _MARK + value + _MARK
    if isinstance(value, list):
        return f"[{','.join(map(_literal, value))}]"
    if isinstance(value, dict):
        if not all(map(_BARE.fullmatch, value)):
            raise ValueError(", ".join(value))
        return "{" + ",".join(f"{key}:{_literal(value[key])}" for key in sorted(value, key=str.lower)) + "}"
    return json.dumps(value)
