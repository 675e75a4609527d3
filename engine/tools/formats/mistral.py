"""`Mistral` and `MistralArgs`: calls behind the tag `[TOOL_CALLS]`, as a list or one by one."""

from __future__ import annotations

import secrets
import string
from dataclasses import replace

from headrace.engine.tools.formats.objects import objects
from headrace.engine.tools.machine import Reading
from headrace.engine.tools.parser import ToolParser
from headrace.engine.tools.shapes import CallShape, CallStructure

__all__ = ["Mistral", "MistralArgs"]


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
        return CallStructure("[TOOL_CALLS][", objects(shapes, "arguments"), ", ", "]", maximum)


class MistralArgs(Mistral):
    """Newer Mistral models: reads the same calls as `Mistral`, and forces the form `[TOOL_CALLS]name[ARGS]{...}`."""

    markers = ("[ARGS]",)

    @classmethod
    def structure(cls, shapes: tuple[CallShape, ...], maximum: int | None) -> CallStructure:
        """Return a structure with a tag for each call."""
        calls = tuple(replace(shape, before=f"[TOOL_CALLS]{shape.name}[ARGS]") for shape in shapes)
        return CallStructure("", calls, "", "", maximum)
