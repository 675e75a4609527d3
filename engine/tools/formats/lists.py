"""`Granite`, `Phi4Mini` and `Hunyuan`: calls as a JSON list between tags; they differ in the tags."""

from __future__ import annotations

from typing import ClassVar

from headrace.engine.tools.formats.objects import objects
from headrace.engine.tools.machine import Reading
from headrace.engine.tools.parser import ToolParser
from headrace.engine.tools.shapes import CallShape, CallStructure

__all__ = ["Granite", "Hunyuan", "Phi4Mini"]


class _Listed(ToolParser):
    """Calls as `{"name": ..., "arguments": {...}}`, one or a list of them, between tags."""

    tags: ClassVar[tuple[str, ...]]
    """Tags before calls; grammars write the first."""
    closer: ClassVar[str]
    """Tag behind calls, which may be missing."""

    def read(self) -> Reading[None]:
        """Read text and calls in any order."""
        while (yield from self.text_until(self.tags)):
            yield from self.attempt(self._calls())

    def _calls(self) -> Reading[None]:
        yield from self.call_objects()
        if self.closer and (yield from self.accept(self.closer)):
            yield from self.space()

    @classmethod
    def structure(cls, shapes: tuple[CallShape, ...], maximum: int | None) -> CallStructure:
        """Return the structure of one list."""
        return CallStructure(f"{cls.tags[0]}[", objects(shapes, "arguments"), ", ", f"]{cls.closer}", maximum)


class Granite(_Listed):
    """Granite 3: `<|tool_call|>[{"name": ..., "arguments": {...}}]`."""

    markers = ("<|tool_call|>",)
    foreign_markers = ("<|tool|>",)  # Phi-4-mini
    keeps_special_tokens = True
    tags = ("<|tool_call|>", "<tool_call>")
    closer = ""


class Phi4Mini(_Listed):
    """Phi-4-mini: `<|tool_call|>[{"name": ..., "arguments": {...}}]<|/tool_call|>`, or a list behind `functools`."""

    markers = ("<|tool|>", "functools[")
    keeps_special_tokens = True
    tags = ("<|tool_call|>", "functools")
    closer = "<|/tool_call|>"


class Hunyuan(_Listed):
    """Hunyuan A13B: `<tool_calls>[{"name": ..., "arguments": {...}}]</tool_calls>`."""

    markers = ("<tool_calls>[",)
    tags = ("<tool_calls>",)
    closer = "</tool_calls>"
