"""`LlamaJson`: calls as bare JSON objects, as Llama 3.1 to 3.3 write them."""

from __future__ import annotations

from headrace.engine.tools.formats.objects import objects
from headrace.engine.tools.machine import Reading
from headrace.engine.tools.parser import ToolParser
from headrace.engine.tools.shapes import CallShape, CallStructure

__all__ = ["LlamaJson"]

_PYTHON_TAG = "<|python_tag|>"


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
        return CallStructure("", objects(shapes, "parameters"), "; ", "", maximum)
