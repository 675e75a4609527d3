"""`Sandbox`: Jinja's immutable sandbox with a budget, and what chat templates expect to find in it; renders nothing.

Imported with the first chat template, since it imports jinja2.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from datetime import datetime
from functools import partial, wraps
from typing import Any

from jinja2 import TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

from headrace.engine.chat_template import Budget

__all__ = ["Sandbox"]

_WIDE = ("batch", "center", "format", "indent", "slice", "wordwrap")  # filters that could write at any width


class _Generation(Extension):
    """`{% generation %}` marks the assistant's part for training; here it is transparent."""

    tags = {"generation"}

    def parse(self, parser: Any) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body).set_lineno(line)


class _Bounded(NodeTransformer):
    """Loops and `~`, which no sandbox intercepts, go through filters of ours."""

    def visit_For(self, node: nodes.For) -> nodes.Node:
        self.generic_visit(node)
        node.iter = nodes.Filter(node.iter, "_timed", [], [], None, None)
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        return nodes.Filter(nodes.List(node.nodes), "_joined", [], [], None, None)


class Sandbox(ImmutableSandboxedEnvironment):
    """Compiles templates that ask `budget` at every turn of a loop, every call and every growing operation."""

    intercepted_binops = frozenset({"*", "**", "%", "+"})

    def __init__(self, budget: Budget) -> None:
        """Set up the filters and functions that transformers gives to chat templates."""
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols])
        self._budget = budget
        for name in _WIDE:
            self.filters[name] = _narrow(self.filters[name], budget)
        self.filters["_timed"] = partial(_timed, budget=budget)
        self.filters["_joined"] = partial(_joined, budget=budget)
        self.filters["tojson"] = _to_json
        self.globals["raise_exception"] = _raise_exception
        self.globals["strftime_now"] = lambda form: datetime.now().strftime(form)

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree = super()._parse(source, name, filename)
        _Bounded().visit(tree)  # which changes it in place
        tree.set_environment(self)
        return tree

    def call(__self, __context: Any, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        """Call a function of the template's; `range` has a limit of its own."""
        budget = __self._budget
        budget.check_time()
        budget.check_numbers(args if __obj is not __self.globals["range"] else ())
        budget.check_numbers(kwargs.values())
        result = super().call(__context, __obj, *args, **kwargs)
        if isinstance(result, str):
            budget.check_length(len(result))
        return result

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        """Find `str.format`, whose format may be wide."""
        wrapped = super().wrap_str_format(value)
        if wrapped is not None:
            self._budget.check_operation("%", str(value.__self__), None)
        return wrapped

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        """Carry out an operation whose result may be large."""
        self._budget.check_time()
        self._budget.check_operation(operator, left, right)
        return super().call_binop(context, operator, left, right)


def _timed(items: Iterable[Any], budget: Budget) -> Iterator[Any]:
    for item in items:
        budget.check_time()
        yield item


def _joined(values: list[Any], budget: Budget) -> str:
    texts = list(map(str, values))
    budget.check_time()
    budget.check_length(sum(map(len, texts)))
    return "".join(texts)


def _narrow(function: Any, budget: Budget) -> Any:
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
    raise TemplateError(message)
