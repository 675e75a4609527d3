"""`ToolCode`: calls in fences of Markdown, as users of Gemma 3 have the model write them."""

from __future__ import annotations

from headrace.engine.tools.formats.objects import objects
from headrace.engine.tools.formats.pythonic import Pythonic
from headrace.engine.tools.machine import Reading
from headrace.engine.tools.shapes import CallShape, CallStructure

__all__ = ["ToolCode"]

_FENCE = "```"


class ToolCode(Pythonic):
    """Gemma 3: Python's calls in a fence `tool_code`, or objects of `name` and `parameters` in a fence `json`.

    Gemma has no format of its own: these are the ones that its guides prompt for. JSON with other keys is content.
    """

    markers = (f"{_FENCE}tool_code",)
    keeps_special_tokens = False

    def read(self) -> Reading[None]:
        """Read text and fences in any order."""
        code, data = f"{_FENCE}tool_code", f"{_FENCE}json"
        while tag := (yield from self.text_until((code, data))):
            yield from self.attempt(self._code() if tag == code else self._data())

    def _code(self) -> Reading[None]:
        yield from self.space()
        if (yield from self.peek()) == "[":
            yield from self.call_list()
        else:
            while (yield from self.peek()) not in ("`", ""):
                yield from self.python_call()
                yield from self.space()
        yield from self.accept(_FENCE)
        yield from self.space()

    def _data(self) -> Reading[None]:
        yield from self.call_objects(frozenset({"name", "parameters", "arguments"}))
        yield from self.accept(_FENCE)
        yield from self.space()

    @classmethod
    def structure(cls, shapes: tuple[CallShape, ...], maximum: int | None) -> CallStructure:
        """Return the structure of a fence of JSON objects."""
        return CallStructure(f"{_FENCE}json\n[", objects(shapes, "parameters"), ", ", f"]\n{_FENCE}", maximum)
