"""`Gemma4`: calls of Gemma 4 between special tokens, with bare keys and strings between marks of their own."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Final

from headrace.engine.tools.machine import Malformed, Reading
from headrace.engine.tools.parser import ToolParser
from headrace.engine.tools.shapes import CallShape, CallStructure
from headrace.engine.tools.values import JsonScanner

__all__ = ["Gemma4", "GemmaScanner"]

_QUOTE: Final = '<|"|>'
_NOT_IN_KEYS: Final = frozenset('{}[],"<>\n\r')


class GemmaScanner(JsonScanner):
    """Scanner of one value as Gemma 4 writes it: JSON whose keys are bare and whose strings stand in `<|"|>`.

    A string has no escapes and ends at the next mark. A key may stand between marks, too.
    """

    quotes = ""
    words = {"None": "null"} | JsonScanner.words

    __slots__ = ()

    def _value(self, text: str, at: int, limit: int) -> int:
        return self._begin(at, is_key=False) if text[at] == _QUOTE[0] else super()._value(text, at, limit)

    def _key(self, text: str, at: int, limit: int) -> int:
        if text[at] == _QUOTE[0]:
            return self._begin(at, is_key=True)
        if text[at] in _NOT_IN_KEYS or text[at] == ":":
            return self._reject(at)
        if text[at] not in " ":
            self.out.append('"')
            self._read = self._bare_key
            return at
        return at + 1

    def _bare_key(self, text: str, at: int, limit: int) -> int:
        char = text[at]
        if char == ":":
            self.out.append('"')
            self._read = self._colon
            return at
        if char in _NOT_IN_KEYS:
            return self._reject(at)
        self.out.append(json.dumps(char, ensure_ascii=False)[1:-1])
        return at + 1

    def _begin(self, at: int, is_key: bool) -> int:
        self._is_key, self._partial, self._read = is_key, "", self._opening
        return at

    def _opening(self, text: str, at: int, limit: int) -> int:
        self._partial += text[at]
        if not _QUOTE.startswith(self._partial):
            return self._reject(at)
        if self._partial == _QUOTE:
            self.out.append('"')
            self._partial, self._read = "", self._string
        return at + 1

    def _string(self, text: str, at: int, limit: int) -> int:
        stop = text.find(_QUOTE[0], at, limit)
        stop = limit if stop < 0 else stop
        self._write(text[at:stop])
        if stop < limit:
            self._read = self._closing
        return stop

    def _closing(self, text: str, at: int, limit: int) -> int:
        found = self._partial + text[at]
        if not _QUOTE.startswith(found):  # what began like a mark is a part of the string
            self._write(self._partial)
            self._partial, self._read = "", self._string
            return at
        self._partial = found
        if found == _QUOTE:
            self._partial = ""
            self.out.append('"')
            if self._is_key:
                self._read = self._colon
            else:
                self._end_value()
        return at + 1

    def _write(self, text: str) -> None:
        self.out.append(json.dumps(text, ensure_ascii=False)[1:-1])


class Gemma4(ToolParser):
    """Gemma 4: `<|tool_call>call:name{key:<|"|>text<|"|>,other:1}<tool_call|>` for each call."""

    markers = ("<|tool_call>call:",)
    keeps_special_tokens = True

    def read(self) -> Reading[None]:
        """Read text and calls in any order."""
        while (yield from self.text_until(("<|tool_call>",))):
            yield from self.attempt(self._call())

    def _call(self) -> Reading[None]:
        yield from self.space()
        yield from self.expect("call:")
        name = yield from self.word("-.")
        if (yield from self.peek()) != "{":
            raise Malformed
        self.start_call(name)
        yield from self.stream_arguments(GemmaScanner())
        self.end_call()
        yield from self.space()
        yield from self.accept("<tool_call|>")
        yield from self.space()

    @classmethod
    def structure(cls, shapes: tuple[CallShape, ...], maximum: int | None) -> CallStructure:
        """Return the structure of calls as the template of Gemma 4 writes them."""
        calls = tuple(
            replace(shape, before=f"<|tool_call>call:{shape.name}{{", after="}<tool_call|>", style="marked")
            for shape in shapes
        )
        return CallStructure("", calls, "", "", maximum)
