"""`Glm45` and `Glm4`: calls of GLM-4.5 and newer, between tags, and of GLM-4, a name and a line of JSON."""

from __future__ import annotations

from dataclasses import replace

from headrace.engine.tools.machine import Malformed, Reading
from headrace.engine.tools.parameters import ParameterParser
from headrace.engine.tools.parser import ToolParser
from headrace.engine.tools.shapes import ArgumentTags, CallShape, CallStructure

__all__ = ["Glm4", "Glm45"]


class Glm45(ParameterParser):
    """GLM-4.5 to 4.7: `<tool_call>name`, then `<arg_key>key</arg_key><arg_value>value</arg_value>`s, `</tool_call>`."""

    markers = ("<arg_key>",)
    foreign_markers = ("<tool_sep>",)  # the same tags, and one more behind the name: Hy3

    def read(self) -> Reading[None]:
        """Read text and calls in any order."""
        while (yield from self.text_until(("<tool_call>",))):
            yield from self.attempt(self._call())

    def _call(self) -> Reading[None]:
        yield from self.space()
        name = yield from self.word("-.")
        yield from self.space()
        if not (yield from self.sees("<arg_key>")) and not (yield from self.sees("</tool_call>")):
            raise Malformed
        self.begin_arguments(name)
        while (yield from self.accept("<arg_key>")):
            yield from self.argument("</arg_key> <arg_value>", "</arg_value>")
            yield from self.space()
        yield from self.expect("</tool_call>")
        self.end_arguments()
        yield from self.space()

    @classmethod
    def structure(cls, shapes: tuple[CallShape, ...], maximum: int | None) -> CallStructure:
        """Return the structure of calls as the template of GLM-4.5 writes them."""
        tags = ArgumentTags("<arg_key>", "</arg_key>\n<arg_value>", "</arg_value>", "\n")
        calls = tuple(
            replace(shape, before=f"<tool_call>{shape.name}\n", after="</tool_call>", style="tagged", tags=tags)
            for shape in shapes
        )
        return CallStructure("", calls, "\n", "", maximum)


class Glm4(ToolParser):
    """GLM-4 and GLM-4-0414: the name, a line feed and a JSON object at the start of the text, and no tag.

    Where the offered tools are known, text with another name is content.
    """

    markers = ("请使用 Json 格式表示调用的参数",)

    def read(self) -> Reading[None]:
        """Read calls at the start of the text."""
        while (yield from self.attempt(self._call())):
            pass

    def _call(self) -> Reading[None]:
        yield from self.space()
        name = yield from self.word("-.")
        if self.tools and name not in self.tools:
            raise Malformed
        yield from self.expect("\n")
        yield from self.object_call(name)

    @classmethod
    def structure(cls, shapes: tuple[CallShape, ...], maximum: int | None) -> CallStructure:
        """Return a structure of names and objects."""
        return CallStructure("", tuple(replace(shape, before=f"{shape.name}\n") for shape in shapes), "\n", "", maximum)
