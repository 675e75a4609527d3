"""`ChatTemplate`: renders a model's chat template within limits of time and size; never tokenises.

A template is a program that comes with the model. It runs in Jinja's immutable sandbox, which alone would let it loop
for hours or build a string of any size: here every turn of a loop and every call looks at the clock, and what would
grow a string beyond the limit is refused before it is built. What looks at a text without growing it (`in`, `find`,
`count`, `striptags`, `urlize`) is bounded by that text's size alone: with texts near the limit it may overrun the time.
`jinja2` is imported with the first template.
Next to read: template_sandbox.py, which asks the budget.
"""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

__all__ = ["Budget", "ChatTemplate", "TemplateTooCostly"]

_SECONDS: Final = 2.0
_MAX_CHARS: Final = 16 * 2**20
_MAX_BITS: Final = 4096
_MAX_ITEMS: Final = 10**5  # of a list that is not given but made, as of `range` in Jinja's sandbox
_MAX_NUMBER: Final = 10**6  # of a width or a count
_WIDE_FORMAT: Final = re.compile(r"%[^a-zA-Z%]*(?:\*|\d{5,})|\{[^}]*\d{5,}[^}]*\}|\{[^{}]*:[^{}]*\{")


class TemplateTooCostly(Exception):
    """The template ran past its time or would have built too long a text."""


class ChatTemplate:
    """One compiled template. Safe to render from several threads."""

    def __init__(self, source: str, *, seconds: float = _SECONDS, max_chars: int = _MAX_CHARS) -> None:
        """Compile `source`.

        Args:
            source: Jinja text.
            seconds: Time that one rendering may take.
            max_chars: Characters that a rendering, or any text on the way to it, may have.

        Raises:
            jinja2.TemplateError: It does not compile.
        """
        from headrace.engine.template_sandbox import Sandbox

        self._budget = Budget(seconds, max_chars)
        self._template = Sandbox(self._budget).from_string(source)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        names: Mapping[str, str] | None = None,
    ) -> str:
        """The text of a chat, up to where the assistant's next answer begins.

        Args:
            messages: `role`, `content` and whatever else the template reads.
            tools: Definitions, as OpenAI's API writes them; None where the model is offered none.
            names: Special tokens by the names that templates use, such as `bos_token`.

        Raises:
            TemplateTooCostly: It ran past its time or its size.
            jinja2.TemplateError: The template refuses the messages.
        """
        budget = self._budget
        budget.start()
        pieces, length = [], 0
        values = {**(names or {}), "messages": messages, "tools": tools, "documents": None}
        try:
            for piece in self._template.generate(values, add_generation_prompt=True):
                length += len(piece)
                budget.check_length(length)
                budget.check_time()
                pieces.append(piece)
        except RecursionError:
            raise TemplateTooCostly("the chat template calls itself without end") from None
        return "".join(pieces)


class Budget(threading.local):
    """What the rendering that runs in this thread may still spend."""

    def __init__(self, seconds: float, max_chars: int) -> None:
        """Allow each rendering so much."""
        self._seconds = seconds
        self._max_chars = max_chars
        self._deadline = 0.0

    def start(self) -> None:
        """A rendering begins."""
        self._deadline = time.monotonic() + self._seconds

    def check_time(self) -> None:
        """Raise once the time is over."""
        if time.monotonic() > self._deadline:
            raise TemplateTooCostly(f"the chat template ran for more than {self._seconds:g} seconds")

    def check_length(self, chars: int) -> None:
        """Refuse a text of so many characters if that is too many."""
        if chars > self._max_chars:
            raise TemplateTooCostly(f"the chat template would write more than {self._max_chars} characters")

    def check_numbers(self, values: Iterable[object]) -> None:
        """Refuse large numbers among widths and counts."""
        for value in values:
            if isinstance(value, int) and abs(value) > _MAX_NUMBER:
                raise TemplateTooCostly(f"the chat template uses a number above {_MAX_NUMBER} as an argument")

    def check_list(self, items: int) -> None:
        """Refuse a list of so many items if that is too many."""
        if items > _MAX_ITEMS:
            raise TemplateTooCostly(f"the chat template would make a list of more than {_MAX_ITEMS} items")

    def check_text_of(self, value: object) -> None:
        """Refuse a value whose text would be too long; parts that it holds several times count each time."""
        chars, left = 0, [value]
        while left:
            part = left.pop()
            if isinstance(part, str):
                chars += len(part)
            elif isinstance(part, Mapping):
                chars += 2 * len(part)
                left += [*part.keys(), *part.values()]
            elif isinstance(part, list | tuple):
                chars += len(part)
                left += part
            self.check_length(chars)
            self.check_time()

    def check_replace(self, text: str, old: str, new: str) -> None:
        """Refuse a replacement that would grow `text` too far."""
        self.check_length(len(text) + text.count(old) * max(len(new) - len(old), 0))

    def check_format(self, form: str, values: object) -> None:
        """Refuse a format that is wide, or whose values are too long together."""
        if _WIDE_FORMAT.search(form.replace("{{", "")):
            raise TemplateTooCostly("the chat template formats to too wide a text")
        self.check_text_of([values] * (form.count("%(") + form.count("{")) or values)

    def check_operation(self, operator: str, left: Any, right: Any) -> None:
        """Refuse an operation whose result would be too large."""
        if operator == "**":
            if isinstance(left, int) and isinstance(right, int) and left.bit_length() * abs(right) > _MAX_BITS:
                raise TemplateTooCostly("the chat template raises a number to too high a power")
        elif operator == "%":
            if isinstance(left, str):
                self.check_format(left, right)
        elif operator == "+":
            if hasattr(left, "__len__") and hasattr(right, "__len__"):
                self._check_size(left, len(left) + len(right))
        else:
            for sized, count in ((left, right), (right, left)):
                if hasattr(sized, "__len__") and isinstance(count, int):
                    self._check_size(sized, len(sized) * max(count, 0))
            if isinstance(left, int) and isinstance(right, int) and left.bit_length() + right.bit_length() > _MAX_BITS:
                raise TemplateTooCostly("the chat template multiplies to too high a number")

    def _check_size(self, value: object, size: int) -> None:
        check = self.check_length if isinstance(value, str | bytes) else self.check_list
        check(size)
