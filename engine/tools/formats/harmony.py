"""`Harmony`: messages in channels, as gpt-oss writes them: reasoning, calls and content have headers of their own."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Final

from headrace.engine.tools.events import Content, Reasoning
from headrace.engine.tools.machine import Malformed, Reading
from headrace.engine.tools.parser import ToolParser
from headrace.engine.tools.shapes import CallShape, CallStructure

__all__ = ["Harmony"]

_BEGINS: Final = ("<|start|>", "<|channel|>")
_ENDS: Final = ("<|end|>", "<|call|>", "<|return|>")
_MESSAGE: Final = "<|message|>"
_MAX_HEADER: Final = 256
_CHANNEL = re.compile(r"(?:<\|channel\|>|^)\s*(\w+)")
_RECIPIENT = re.compile(r"\bto=(?:functions\.)?([\w.-]+)", re.ASCII)


class Harmony(ToolParser):
    """gpt-oss: `<|channel|>commentary to=functions.name <|constrain|>json<|message|>{...}<|call|>`.

    The channel `analysis` is reasoning, whatever the mode; all else that is addressed to no function is content.
    """

    markers = ("<|channel|>",)
    keeps_special_tokens = True
    reads_all_answers = True

    def run(self) -> Reading[None]:
        """Read messages up to the end of the text."""
        self._kind: type[Content] | type[Reasoning] = Content
        if not (yield from self.attempt(self._addressed())):
            self.give_up()
        while tag := (yield from self.text_until(_BEGINS + _ENDS, self._kind)):
            self._kind = Content
            yield from self.attempt(self.space() if tag in _ENDS else self._message(tag))

    def _addressed(self) -> Reading[None]:
        """Read the first message if its header starts with the recipient, since the role is in the prompt."""
        yield from self.space()
        if not (yield from self.sees("to=")):
            return
        yield from self._message("<|start|>")

    def _message(self, tag: str) -> Reading[None]:
        header = yield from self.text_before(_MESSAGE, _MAX_HEADER)
        if header is None:
            raise Malformed
        channel = _CHANNEL.search(header) if tag == "<|channel|>" else re.search(r"<\|channel\|>\s*(\w+)", header)
        recipient = _RECIPIENT.search(header)
        yield from self.space()
        if recipient is not None:
            yield from self.object_call(recipient[1])
        elif channel is not None and channel[1] == "analysis":
            self._kind = Reasoning

    @classmethod
    def structure(cls, shapes: tuple[CallShape, ...], maximum: int | None) -> CallStructure:
        """Return the structure of messages to functions; the end of the completion ends the last."""
        calls = tuple(
            replace(shape, before=f"<|channel|>commentary to=functions.{shape.name} <|constrain|>json{_MESSAGE}")
            for shape in shapes
        )
        return CallStructure("", calls, "<|call|><|start|>assistant", "", maximum)
