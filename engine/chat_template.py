"""`ChatTemplate`: renders a model's chat template within limits of time and size; never tokenises.

A template is a program that comes with the model. It runs in Jinja's immutable sandbox, which alone would let it loop
for hours or build a string of any size: here every turn of a loop and every call looks at the clock, and what would
grow a string beyond the limit is refused before it is built. `jinja2` is imported with the first template.
"""

from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from functools import partial, wraps
from typing import Any, Final

__all__ = ["ChatTemplate", "TemplateTooCostly"]

_SECONDS: Final = 2.0
_MAX_CHARS: Final = 16 * 2**20
_MAX_BITS: Final = 4096
_MAX_NUMBER: Final = 10**6  # of an argument: a width, a count
_WIDE_FORMAT: Final = re.compile(r"%[^a-zA-Z%]*(?:\*|\d{5,})|\{[^}]*\d{5,}[^}]*\}")


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
        self._budget = _Budget(seconds, max_chars)
        self._template = _environment(self._budget).from_string(source)

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


class _Budget(threading.local):
    """What the rendering that runs in this thread may still spend."""

    def __init__(self, seconds: float, max_chars: int) -> None:
        self._seconds = seconds
        self._max_chars = max_chars
        self._deadline = 0.0

    def start(self) -> None:
        self._deadline = time.monotonic() + self._seconds

    def check_time(self) -> None:
        if time.monotonic() > self._deadline:
            raise TemplateTooCostly(f"the chat template ran for more than {self._seconds:g} seconds")

    def check_length(self, chars: int) -> None:
        if chars > self._max_chars:
            raise TemplateTooCostly(f"the chat template would write more than {self._max_chars} characters")

    def check_numbers(self, values: Iterable[object]) -> None:
        for value in values:
            if isinstance(value, int) and abs(value) > _MAX_NUMBER:
                raise TemplateTooCostly(f"the chat template uses a number above {_MAX_NUMBER} as an argument")

    def check_operation(self, operator: str, left: Any, right: Any) -> None:
        if operator == "**":
            if isinstance(left, int) and isinstance(right, int) and left.bit_length() * abs(right) > _MAX_BITS:
                raise TemplateTooCostly("the chat template raises a number to too high a power")
        elif operator == "%":
            if isinstance(left, str) and _WIDE_FORMAT.search(left):
                raise TemplateTooCostly("the chat template formats to too wide a text")
        elif operator == "+":
            if hasattr(left, "__len__") and hasattr(right, "__len__"):
                self.check_length(len(left) + len(right))
        else:
            for sized, count in ((left, right), (right, left)):
                if hasattr(sized, "__len__") and isinstance(count, int):
                    self.check_length(len(sized) * max(count, 0))
            if isinstance(left, int) and isinstance(right, int) and left.bit_length() + right.bit_length() > _MAX_BITS:
                raise TemplateTooCostly("the chat template multiplies to too high a number")


def _environment(budget: _Budget) -> Any:
    """A sandbox that looks at `budget`, with the filters and functions that chat templates expect."""
    from jinja2 import nodes
    from jinja2.ext import Extension, loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment
    from jinja2.visitor import NodeTransformer

    class Generation(Extension):
        """`{% generation %}` marks the assistant's part for training; here it is transparent."""

        tags = {"generation"}

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return nodes.Scope(body).set_lineno(line)

    class Bounded(NodeTransformer):
        """Loops and `~`, which no sandbox intercepts, go through filters of ours."""

        def visit_For(self, node: nodes.For) -> nodes.Node:
            self.generic_visit(node)
            node.iter = nodes.Filter(node.iter, "_timed", [], [], None, None)
            return node

        def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
            self.generic_visit(node)
            return nodes.Filter(nodes.List(node.nodes), "_joined", [], [], None, None)

    class Sandbox(ImmutableSandboxedEnvironment):
        intercepted_binops = frozenset({"*", "**", "%", "+"})

        def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
            tree = super()._parse(source, name, filename)
            Bounded().visit(tree)  # which changes it in place
            tree.set_environment(self)
            return tree

        def call(__self, __context: Any, __obj: Any, *args: Any, **kwargs: Any) -> Any:
            budget.check_time()
            budget.check_numbers(args if __obj is not __self.globals["range"] else ())
            budget.check_numbers(kwargs.values())
            result = super().call(__context, __obj, *args, **kwargs)
            if isinstance(result, str):
                budget.check_length(len(result))
            return result

        def wrap_str_format(self, value: Any) -> Any:
            wrapped = super().wrap_str_format(value)
            if wrapped is not None:
                budget.check_operation("%", str(value.__self__), None)
            return wrapped

        def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
            budget.check_time()
            budget.check_operation(operator, left, right)
            return super().call_binop(context, operator, left, right)

    def joined(values: list[Any]) -> str:
        texts = list(map(str, values))
        budget.check_time()
        budget.check_length(sum(map(len, texts)))
        return "".join(texts)

    environment = Sandbox(trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols])
    for name in ("batch", "center", "format", "indent", "slice", "wordwrap"):  # which could write at any width
        environment.filters[name] = _narrow(environment.filters[name], budget)
    environment.filters["_timed"] = partial(_timed, budget=budget)
    environment.filters["_joined"] = joined
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment


def _timed(items: Iterable[Any], budget: _Budget) -> Iterator[Any]:
    for item in items:
        budget.check_time()
        yield item


def _narrow(function: Any, budget: _Budget) -> Any:
    """`function`, refused where a number among its arguments or in a format is large."""

    @wraps(function)
    def narrow(*args: Any, **kwargs: Any) -> Any:
        budget.check_numbers((*args, *kwargs.values()))
        for value in args:
            if isinstance(value, str):
                budget.check_operation("%", value, None)
        return function(*args, **kwargs)

    return narrow


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON as chat templates expect it: Jinja's own filter would escape it for HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    from jinja2 import TemplateError

    raise TemplateError(message)
