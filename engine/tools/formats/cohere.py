"""`Cohere`: calls as a JSON list between the tags of an action, as Command R7B and Command A write them."""

from __future__ import annotations

from dataclasses import replace

from headrace.engine.tools.machine import Reading
from headrace.engine.tools.parser import ToolParser
from headrace.engine.tools.shapes import CallShape, CallStructure

__all__ = ["Cohere"]

_TAGS = ("<|START_ACTION|>", "<|END_ACTION|>")


class Cohere(ToolParser):
    """Cohere: `<|START_ACTION|>[{"tool_call_id": "0", "tool_name": ..., "parameters": {...}}]<|END_ACTION|>`.

    The model counts the calls of each answer from 0, so its ids are not taken over.
    """

    markers = (_TAGS[0],)
    keeps_special_tokens = True
    name_keys = ("tool_name", "name")

    def read(self) -> Reading[None]:
        """Read text and calls in any order."""
        while (yield from self.text_until((_TAGS[0],))):
            yield from self.attempt(self._calls())

    def _calls(self) -> Reading[None]:
        yield from self.call_objects()
        yield from self.accept(_TAGS[1])
        yield from self.space()

    @classmethod
    def structure(cls, shapes: tuple[CallShape, ...], maximum: int | None) -> CallStructure:
        """Return the structure of one list, without ids."""
        calls = tuple(
            replace(shape, before=f'{{"tool_name": "{shape.name}", "parameters": ', after="}") for shape in shapes
        )
        return CallStructure(f"{_TAGS[0]}[\n    ", calls, ",\n    ", f"\n]{_TAGS[1]}", maximum)
