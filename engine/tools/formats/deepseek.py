"""`DeepSeekV3` and `DeepSeekV31`: calls between DeepSeek's tags, with the arguments in a fence or without one."""

from __future__ import annotations

from dataclasses import replace

from headrace.engine.tools.machine import Reading
from headrace.engine.tools.parser import ToolParser
from headrace.engine.tools.shapes import CallShape, CallStructure

__all__ = ["DeepSeekV3", "DeepSeekV31"]

_ALL = ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>")
_ONE = ("<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>")
_SEPARATOR = "<｜tool▁sep｜>"
_FENCE = "```"


class DeepSeekV3(ToolParser):
    """DeepSeek V3 and R1: a type, the name and a fence of JSON for each call; reads the form of V3.1 as well."""

    markers = (_SEPARATOR,)
    keeps_special_tokens = True

    def read(self) -> Reading[None]:
        """Read text and calls in any order."""
        while tag := (yield from self.text_until((_ALL[0], _ONE[0]))):
            yield from self.attempt(self._calls(tag))

    def _calls(self, tag: str) -> Reading[None]:
        yield from self.space()
        if tag == _ALL[0]:
            yield from self.expect(_ONE[0])
        while True:
            yield from self._call()
            if not (yield from self.accept(_ONE[0])):
                break
        yield from self.accept(_ALL[1])
        yield from self.space()

    def _call(self) -> Reading[None]:
        yield from self.space()
        name = yield from self.word("-.")
        yield from self.expect(_SEPARATOR)
        yield from self.space()
        fenced = False
        if (yield from self.peek()) != "{":  # then the word was the type
            name = yield from self.word("-.")
            yield from self.space()
            fenced = yield from self.accept(_FENCE)
            yield from self.accept("json")
            yield from self.space()
        yield from self.object_call(name)
        yield from self.space()
        if fenced:
            yield from self.accept(_FENCE)
            yield from self.space()
        yield from self.accept(_ONE[1])
        yield from self.space()

    @classmethod
    def structure(cls, shapes: tuple[CallShape, ...], maximum: int | None) -> CallStructure:
        """Return the structure of calls as the template of DeepSeek V3 writes them."""
        calls = tuple(
            replace(
                shape,
                before=f"{_ONE[0]}function{_SEPARATOR}{shape.name}\n{_FENCE}json\n",
                after=f"\n{_FENCE}{_ONE[1]}",
            )
            for shape in shapes
        )
        return CallStructure(_ALL[0], calls, "\n", _ALL[1], maximum)


class DeepSeekV31(DeepSeekV3):
    """DeepSeek V3.1: the name and JSON for each call; reads the form of V3 as well."""

    foreign_markers = (f"{_FENCE}json",)

    @classmethod
    def structure(cls, shapes: tuple[CallShape, ...], maximum: int | None) -> CallStructure:
        """Return the structure of calls as the template of DeepSeek V3.1 writes them."""
        calls = tuple(replace(shape, before=f"{_ONE[0]}{shape.name}{_SEPARATOR}", after=_ONE[1]) for shape in shapes)
        return CallStructure(_ALL[0], calls, "", _ALL[1], maximum)
