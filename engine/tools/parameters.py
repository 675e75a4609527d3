"""`ParameterParser`: the base of formats that write each argument between tags, strings without quotes; knows no tags.

Whether `5` is a number or a string is in the schema of the tool alone, so these formats read the offered tools.
"""

from __future__ import annotations

import json
from typing import Any, Final

from headrace.engine.tools.machine import MAX_HELD, MAX_NAME, Malformed, Reading
from headrace.engine.tools.parser import ToolParser
from headrace.engine.tools.values import SPACE, JsonScanner, PythonScanner

__all__ = ["ParameterParser", "is_string", "resolved"]

_MAX_REFERENCES: Final = 16  # a schema may refer to itself


class ParameterParser(ToolParser):
    """Parser of calls whose arguments are written one by one, each between tags.

    An argument whose schema is that of a string is what the model wrote, as it is. Any other is JSON, or a Python
    literal, if it is one, and else a string, too.
    """

    def begin_arguments(self, name: str) -> None:
        """Emit the start of a call."""
        self.start_call(name)
        tool = self.tools.get(name)
        self._schema: dict[str, Any] = {} if tool is None else tool.parameters
        self._count = 0

    def argument(self, before: str, after: str, *, trims: bool = False) -> Reading[None]:
        """Read the name of an argument up to the text `before`, its value up to `after`, and emit both.

        Args:
            before: Text between the name and the value, but for whitespace.
            after: Text behind the value.
            trims: Whether a line feed at either end of the value is no part of it.
        """
        name = yield from self.text_before(before.split()[0], MAX_NAME)
        if name is None:
            raise Malformed
        for part in before.split()[1:]:
            yield from self.space()
            yield from self.expect(part)
        name = name.strip(SPACE)
        self.write_arguments((", " if self._count else "{") + json.dumps(name, ensure_ascii=False) + ": ")
        self._count += 1
        if trims:
            yield from self.accept("\n")
        if not is_string(self._schema, name):
            text = yield from self.text_before(after, MAX_HELD // 2)
            if text is not None:
                self.write_arguments(_as_json(text.removesuffix("\n") if trims else text))
                return
            # Too long to wait for its end: a string, whose beginning is still held.
            self.write_arguments('"' + json.dumps(self.held_text(), ensure_ascii=False)[1:-1])
        else:
            self.write_arguments('"')
        yield from self.stream_string(after, trims)
        self.write_arguments('"')

    def end_arguments(self) -> None:
        """Emit the end of a call."""
        self.write_arguments("}" if self._count else "{}")
        self.end_call()


def is_string(schema: dict[str, Any], name: str) -> bool:
    """Return whether the argument `name` of a tool can be nothing but a string."""
    properties = schema.get("properties", {})
    found = resolved(properties.get(name), schema)
    kind, listed = found.get("type"), found.get("enum", [found["const"]] if "const" in found else None)
    if isinstance(listed, list) and listed:
        return all(isinstance(value, str) for value in listed)
    return kind in ("string", ["string"])


def resolved(schema: object, root: dict[str, Any]) -> dict[str, Any]:
    """Return a schema, or the one within `root` that it refers to; an empty one if there is none."""
    for _ in range(_MAX_REFERENCES):
        if not isinstance(schema, dict):
            return {}
        reference = schema.get("$ref")
        if not isinstance(reference, str) or not reference.startswith("#/"):
            return schema
        schema = root
        for part in reference.removeprefix("#/").split("/"):
            key = part.replace("~1", "/").replace("~0", "~")
            schema = schema.get(key) if isinstance(schema, dict) else None
    return {}


def _as_json(text: str) -> str:
    """Return the JSON of a value whose type is not known."""
    inner = text.strip(SPACE)
    for scanner in (JsonScanner(), PythonScanner()):
        # The space ends a number.
        if scanner.feed(inner + " ", 0, len(inner) + 1) >= len(inner) and scanner.done:
            return scanner.take()
    return json.dumps(text, ensure_ascii=False)
