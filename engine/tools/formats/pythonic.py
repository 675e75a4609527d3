"""`Pythonic` and `Olmo3`: calls as Python's, in a list or on lines of their own; nothing is evaluated."""

from __future__ import annotations

import json
from dataclasses import replace

from headrace.engine.tools.machine import Malformed, Reading
from headrace.engine.tools.parser import ToolParser
from headrace.engine.tools.shapes import CallShape, CallStructure
from headrace.engine.tools.values import PythonScanner

__all__ = ["Olmo3", "Pythonic"]

_PYTHON_TAG = "<|python_tag|>"
_CALLS = ("<function_calls>", "</function_calls>")


class Pythonic(ToolParser):
    """Llama 3.2 and 4, and others: `[f(a=1, b="x"), g()]` at the start of the text.

    Values are Python literals, which are read without evaluating anything. A list with positional arguments is content.
    """

    markers: tuple[str, ...] = ("[func_name1(", "[func1(")
    keeps_special_tokens = True

    def read(self) -> Reading[None]:
        """Read a list of calls if the text starts with one."""
        yield from self.attempt(self._list())

    def _list(self) -> Reading[None]:
        yield from self.space()
        yield from self.tag(_PYTHON_TAG)
        yield from self.space()
        yield from self.call_list()

    def call_list(self) -> Reading[None]:
        """Read a list of calls and the whitespace behind it."""
        yield from self.expect("[")
        while True:
            yield from self.space()
            yield from self.python_call()
            yield from self.space()
            if not (yield from self.accept(",")):
                break
        yield from self.expect("]")
        yield from self.space()

    def python_call(self) -> Reading[None]:
        """Read one `f(a=1, b="x")` and emit the call."""
        name = yield from self.word(".-")
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
            if (yield from self.peek()) == ")":
                return
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


class Olmo3(Pythonic):
    """OLMo 3: `<function_calls>f(a=1, b="x")`, a line for each call, `</function_calls>`.

    Values are Python literals or JSON, which is what its template writes.
    """

    markers = (_CALLS[0],)
    foreign_markers = ("<invoke",)

    def read(self) -> Reading[None]:
        """Read text and calls in any order."""
        while (yield from self.text_until((_CALLS[0],))):
            yield from self.attempt(self._lines())

    def _lines(self) -> Reading[None]:
        yield from self.space()
        if (yield from self.peek()) == "[":
            yield from self.call_list()
        else:
            yield from self.python_call()
            yield from self.space()
            while (yield from self.peek()) not in ("<", ""):
                yield from self.accept(",")
                yield from self.space()
                yield from self.python_call()
                yield from self.space()
        yield from self.accept(_CALLS[1])
        yield from self.space()

    @classmethod
    def structure(cls, shapes: tuple[CallShape, ...], maximum: int | None) -> CallStructure:
        """Return the structure of calls on lines of their own."""
        return replace(Pythonic.structure(shapes, maximum), opening=_CALLS[0], separator="\n", closing=_CALLS[1])
