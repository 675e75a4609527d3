"""`Hermes`: calls as JSON objects in `<tool_call>` tags, which Qwen, SmolLM3, EXAONE 4 and ERNIE 4.5 write, too."""

from __future__ import annotations

from headrace.engine.tools.formats.objects import objects
from headrace.engine.tools.machine import Reading
from headrace.engine.tools.parser import ToolParser
from headrace.engine.tools.shapes import CallShape, CallStructure

__all__ = ["Hermes"]


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
        calls = objects(shapes, "arguments", before="<tool_call>\n", after="\n</tool_call>")
        return CallStructure("", calls, "\n", "", maximum)
