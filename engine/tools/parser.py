"""`ToolParser`, the base of all formats of tool calls: reads reasoning, ids, and calls written as JSON objects.

Next to read: formats/hermes.py, the commonest format.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Final, Literal

from headrace.engine.tools.definitions import Tool
from headrace.engine.tools.events import Reasoning
from headrace.engine.tools.machine import MAX_NAME, Machine, Malformed, Reading
from headrace.engine.tools.reasoning import THINK, ReasoningTags
from headrace.engine.tools.shapes import CallShape, CallStructure
from headrace.engine.tools.values import SPACE, JsonScanner

__all__ = ["ReasoningMode", "ToolParser"]

ReasoningMode = Literal["none", "tagged", "opened"]
"""Place of reasoning in a completion. `tagged`: it may start with a tag such as <think>. `opened`: it starts inside the
reasoning, because the prompt ends with the tag."""

_ARGUMENTS: Final = ("arguments", "parameters")


class ToolParser(Machine):
    """Parser of one completion with reasoning; the base of all formats, and by itself the format without calls.

    Whitespace beside a tag belongs to the tag.

    A subclass sets `read`. It may set `markers` and `keeps_special_tokens`, and `structure` for forced calls.
    """

    markers: tuple[str, ...] = ()
    """Markers of this format: a chat template that contains one of them teaches it."""
    foreign_markers: tuple[str, ...] = ()
    """Markers of other formats: a chat template that contains one of them does not teach this format."""
    keeps_special_tokens = False
    """Whether the format's tags are special tokens, which the completion's text must then keep."""
    reads_all_answers = False
    """Whether this format has tags in answers without calls, too, so that every completion must be read in it."""
    name_keys: tuple[str, ...] = ("name",)
    """Keys under which `call_object` finds the name of a call."""

    def __init__(
        self,
        reasoning: ReasoningMode = "none",
        make_id: Callable[[int], str] | None = None,
        *,
        tags: ReasoningTags = THINK,
        tools: Iterable[Tool] = (),
    ) -> None:
        """Start a completion.

        Args:
            reasoning: Whether the text may hold reasoning, and whether it starts inside it.
            make_id: Function from the index of a call to its id; None draws random ids.
            tags: Marks of reasoning.
            tools: Tools that were offered. Formats that write strings without quotes read the types of arguments there.
        """
        super().__init__(make_id or self.new_id)
        self._reasoning = reasoning
        self._tags = tags
        self.tools = {tool.name: tool for tool in tools}
        """Tools that were offered, by name."""

    def read(self) -> Reading[None]:
        """Read the text after the reasoning; text that is left unread on return is content."""
        yield from ()

    @classmethod
    def structure(cls, shapes: tuple[CallShape, ...], maximum: int | None) -> CallStructure | None:
        """Return how calls of these shapes are written, for a grammar; None if the format cannot be forced."""
        return None

    def new_id(self, index: int) -> str:
        """Return a random id for a call."""
        return "call_" + secrets.token_hex(12)

    def run(self) -> Reading[None]:
        """Read reasoning, then text in the format, then content."""
        if self._reasoning != "none":
            yield from self._read_reasoning()
        try:
            yield from self.read()
        except Malformed:
            self.give_up()
        yield from self.text_until(())

    def _read_reasoning(self) -> Reading[None]:
        with suppress(Malformed):  # too much whitespace
            yield from self.space()
        for mark in self._tags.opens:
            if (yield from self.sees(mark)):
                self._reasoning = "opened"
                self.take(len(mark))
                self.settle()
                yield from self.attempt(self.space())
                break
        if self._reasoning == "opened":
            self.settle()
            if (yield from self.text_until(self._tags.closes, Reasoning)):
                yield from self.attempt(self.space())
        if self._tags.answer is not None and (yield from self.accept(self._tags.answer[0])):
            self.drop_once(self._tags.answer[1])
            yield from self.attempt(self.space())

    # For `read`: calls as JSON objects.

    def call_objects(self, known: frozenset[str] | None = None) -> Reading[None]:
        """Read one call as `call_object` does, or a list of such calls, and the whitespace around."""
        yield from self.space()
        if not (yield from self.accept("[")):
            yield from self.call_object(known)
        else:
            yield from self.space()
            while not (yield from self.accept("]")):
                yield from self.call_object(known)
                yield from self.space()
                if not (yield from self.accept(",")):
                    yield from self.expect("]")
                    break
                yield from self.space()
        yield from self.space()

    def call_object(self, known: frozenset[str] | None = None) -> Reading[None]:
        """Read one `{"name": ..., "arguments": {...}}`, or with `parameters`, and emit the call.

        Keys may be in any order. If the name comes first, arguments are streamed, and a missing last brace is accepted.

        Args:
            known: Keys that a call may have; another key, or no arguments, makes it malformed. None skips other keys.
        """
        name = arguments = None
        streamed = False
        yield from self.expect("{")
        while True:
            key = yield from self._key()
            if known is not None and key not in known:
                raise Malformed
            if key in self.name_keys and name is None:
                name = _name((yield from self.value(JsonScanner())))
            elif key not in _ARGUMENTS or arguments is not None or streamed:
                yield from self.value(JsonScanner())
            elif name is not None and (yield from self.peek()) == "{":
                yield from self.object_call(name)
                streamed = True
            else:
                arguments = _object((yield from self.value(JsonScanner())))
            yield from self.space()
            if not (yield from self.accept(",")):
                break
        if not (yield from self.accept("}")) and not streamed:
            raise Malformed
        if streamed:
            self.settle()
            return
        if name is None or (known is not None and arguments is None):
            raise Malformed
        self.start_call(name)
        self.write_arguments(arguments or "{}")
        self.end_call()

    def object_call(self, name: str, call_id: str | None = None) -> Reading[None]:
        """Emit a call whose arguments, a JSON object, come next."""
        if (yield from self.peek()) != "{":
            raise Malformed
        self.start_call(name, call_id)
        yield from self.stream_arguments(JsonScanner())
        self.end_call()

    def _key(self) -> Reading[str]:
        yield from self.space()
        if (yield from self.peek()) != '"':
            raise Malformed
        key: str = json.loads((yield from self.value(JsonScanner())))
        yield from self.space()
        yield from self.expect(":")
        yield from self.space()
        return key


def _name(value: str) -> str:
    name = json.loads(value)
    if not isinstance(name, str) or not 0 < len(name) <= MAX_NAME or not name.isprintable():
        raise Malformed
    return name


def _object(value: str) -> str | None:
    """Return the arguments in a value: an object, possibly written as a string; None for `null` and ""."""
    if value in ("null", '""'):
        return None
    if value.startswith('"'):
        inner = json.loads(value).strip(SPACE)
        scanner = JsonScanner()
        if scanner.feed(inner, 0, len(inner)) < len(inner) or not scanner.done:
            raise Malformed
        value = scanner.take()
    if not value.startswith("{"):
        raise Malformed
    return value
