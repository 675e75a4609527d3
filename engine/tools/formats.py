"""The formats in which models write tool calls, one class each; machine.py reads the text."""

from __future__ import annotations

import json
import secrets
import string
from dataclasses import replace

from headrace.engine.tools.machine import Malformed, Reading
from headrace.engine.tools.parser import ToolParser
from headrace.engine.tools.shapes import CallShape, CallStructure
from headrace.engine.tools.values import PythonScanner

__all__ = ["Hermes", "LlamaJson", "Mistral", "MistralArgs", "Pythonic"]

_PYTHON_TAG = "<|python_tag|>"


class Hermes(ToolParser):
    """Hermes 2 and 3, Qwen: `<tool_call>{"name": ..., "arguments": {...}}</tool_call>` for each call."""

    markers = ("<tool_call>",)
    foreign_markers = ("<function=", "<arg_key>")  # the same tag around other contents: Qwen3-Coder, GLM

    def read(self) -> Reading[None]:
        """Read text and calls in any order."""
        while (yield from self.text_until(("<tool_call>",))):
            yield from self.attempt(self._call())

    def _call(self) -> Reading[None]:
        yield from self.space()
        yield from self.call_object()
        yield from self.space()
        yield from self.accept("</tool_call>")
        yield from self.space()

    @classmethod
    def structure(cls, shapes: tuple[CallShape, ...], maximum: int | None) -> CallStructure:
        """Return the structure of calls as Qwen's template writes them."""
        calls = _objects(shapes, "arguments", before="<tool_call>\n", after="\n</tool_call>")
        return CallStructure("", calls, "\n", "", maximum)


class LlamaJson(ToolParser):
    """Llama 3.1 to 3.3: `{"name": ..., "parameters": {...}}` at the start of the text or after `<|python_tag|>`.

    Several calls are separated by `;` or whitespace. An object with other keys is content.
    """

    markers = (_PYTHON_TAG, 'Respond in the format {"name": function name, "parameters"')
    keeps_special_tokens = True

    def read(self) -> Reading[None]:
        """Read calls if the text starts with one, then text and tagged calls."""
        yield from self.attempt(self._first())
        while (yield from self.text_until((_PYTHON_TAG,))):
            yield from self.attempt(self._calls())

    def _first(self) -> Reading[None]:
        yield from self.space()
        yield from self.tag(_PYTHON_TAG)
        yield from self._calls()

    def _calls(self) -> Reading[None]:
        while True:
            yield from self.space()
            yield from self.call_object(frozenset({"name", "parameters", "arguments", "type", "id"}))
            yield from self.space()
            if not (yield from self.accept(";")) and (yield from self.peek()) != "{":
                return

    @classmethod
    def structure(cls, shapes: tuple[CallShape, ...], maximum: int | None) -> CallStructure:
        """Return a structure of bare objects."""
        return CallStructure("", _objects(shapes, "parameters"), "; ", "", maximum)


class Pythonic(ToolParser):
    """Llama 3.2 and 4, and others: `[f(a=1, b="x"), g()]` at the start of the text.

    Values are Python literals, which are read without evaluating anything. A list with positional arguments is content.
    """

    markers = ("[func_name1(", "[func1(")
    keeps_special_tokens = True

    def read(self) -> Reading[None]:
        """Read a list of calls if the text starts with one."""
        yield from self.attempt(self._list())

    def _list(self) -> Reading[None]:
        yield from self.space()
        yield from self.tag(_PYTHON_TAG)
        yield from self.space()
        yield from self.expect("[")
        while True:
            yield from self.space()
            yield from self._call()
            yield from self.space()
            if not (yield from self.accept(",")):
                break
        yield from self.expect("]")
        yield from self.space()

    def _call(self) -> Reading[None]:
        name = yield from self.word(".")
        if name[0].isdigit():
            raise Malformed
        yield from self.expect("(")
        yield from self.space()
        if (yield from self.peek()) == ")":
            self.start_call(name)
            self.write_arguments("{")
        else:
            key = yield from self._keyword()
            self.start_call(name)
            self.write_arguments("{" + key)
            yield from self._values()
        yield from self.expect(")")
        self.write_arguments("}")
        self.end_call()

    def _values(self) -> Reading[None]:
        while True:
            yield from self.stream_arguments(PythonScanner())
            yield from self.space()
            if not (yield from self.accept(",")):
                return
            yield from self.space()
            key = yield from self._keyword()
            self.write_arguments(", " + key)

    def _keyword(self) -> Reading[str]:
        name = yield from self.word("")
        yield from self.space()
        yield from self.expect("=")
        yield from self.space()
        return json.dumps(name) + ": "

    @classmethod
    def structure(cls, shapes: tuple[CallShape, ...], maximum: int | None) -> CallStructure:
        """Return the structure of a list of calls with keyword arguments."""
        calls = tuple(replace(shape, before=f"{shape.name}(", after=")", style="keywords") for shape in shapes)
        return CallStructure("[", calls, ", ", "]", maximum)


class Mistral(ToolParser):
    """Mistral: `[TOOL_CALLS][{"name": ..., "arguments": {...}}]` or `[TOOL_CALLS]name[ARGS]{...}`; forces the first."""

    markers = ("[TOOL_CALLS]",)
    keeps_special_tokens = True

    def new_id(self, index: int) -> str:
        """Return a random id of nine letters and digits, as Mistral's templates demand."""
        return "".join(secrets.choice(string.ascii_letters + string.digits) for _ in range(9))

    def read(self) -> Reading[None]:
        """Read text and calls in either form, in any order."""
        while (yield from self.text_until(("[TOOL_CALLS]",))):
            yield from self.attempt(self._calls())

    def _calls(self) -> Reading[None]:
        yield from self.space()
        yield from (self._array() if (yield from self.accept("[")) else self._named())
        yield from self.space()

    def _array(self) -> Reading[None]:
        while True:
            yield from self.space()
            yield from self.call_object()
            yield from self.space()
            if not (yield from self.accept(",")):
                break
        yield from self.expect("]")

    def _named(self) -> Reading[None]:
        name = yield from self.word("-.")
        call_id = (yield from self.word("-")) if (yield from self.accept("[CALL_ID]")) else None
        yield from self.expect("[ARGS]")
        yield from self.space()
        yield from self.object_call(name, call_id)

    @classmethod
    def structure(cls, shapes: tuple[CallShape, ...], maximum: int | None) -> CallStructure:
        """Return the structure of one array of calls."""
        return CallStructure("[TOOL_CALLS][", _objects(shapes, "arguments"), ", ", "]", maximum)


class MistralArgs(Mistral):
    """Newer Mistral models: reads the same calls as `Mistral`, and forces the form `[TOOL_CALLS]name[ARGS]{...}`."""

    markers = ("[ARGS]",)

    @classmethod
    def structure(cls, shapes: tuple[CallShape, ...], maximum: int | None) -> CallStructure:
        """Return a structure with a tag for each call."""
        calls = tuple(replace(shape, before=f"[TOOL_CALLS]{shape.name}[ARGS]") for shape in shapes)
        return CallStructure("", calls, "", "", maximum)


def _objects(shapes: tuple[CallShape, ...], key: str, before: str = "", after: str = "") -> tuple[CallShape, ...]:
    """Return the shape of each call as an object of name and arguments."""
    return tuple(
        replace(shape, before=f'{before}{{"name": {json.dumps(shape.name)}, "{key}": ', after="}" + after)
        for shape in shapes
    )
