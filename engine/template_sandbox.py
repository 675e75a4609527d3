"""`Sandbox`: Jinja's immutable sandbox with a budget, and what chat templates expect to find in it; renders nothing.

Imported with the first chat template, since it imports jinja2.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from datetime import datetime
from functools import partial, wraps
from typing import Any

from jinja2 import TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

from headrace.engine.chat_template import Budget

__all__ = ["Sandbox"]

_WIDE = ("batch", "center", "indent", "slice", "wordwrap")  # filters that could write at any width
_WALKING = (  # filters that go over a list of any length
    *("batch", "groupby", "list", "map", "max", "min", "reject", "rejectattr", "select", "selectattr"),
    *("slice", "sort", "sum", "unique"),
)
_WRITING = ("pprint", "string")  # filters that write a value of any size


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
        extensions = [_Generation, loopcontrols]
        finalize = partial(_writable, budget=budget)
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=extensions, finalize=finalize)
        self._budget = budget
        del self.globals["lipsum"]  # which writes any amount
        for name in _WIDE:
            self.filters[name] = _narrow(self.filters[name], budget)
        for name in _WALKING:
            self.filters[name] = _walking(self.filters[name], budget)
        for name in _WRITING:
            self.filters[name] = _checked(self.filters[name], budget.check_text_of)
        self.filters["replace"] = partial(_replace, budget=budget)
        self.filters["join"] = _checked_join(self.filters["join"], budget)
        self.filters["format"] = _checked(
            self.filters["format"], lambda form, *args, **named: budget.check_format(str(form), args or named)
        )
        self.filters["_timed"] = partial(_timed, budget=budget)
        self.filters["_joined"] = partial(_joined, budget=budget)
        self.filters["tojson"] = _checked(_to_json, lambda value, *_, **__: budget.check_text_of(value))
        self.globals["raise_exception"] = _raise_exception
        self.globals["strftime_now"] = lambda form: datetime.now().strftime(form)

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree = super()._parse(source, name, filename)
        _Bounded().visit(tree)  # which changes it in place
        tree.set_environment(self)
        return tree

    def call(__self, __context: Any, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        """Call a function of the template's; what could grow is checked before."""
        budget = __self._budget
        budget.check_time()
        _check_method(__obj, args, kwargs, budget)
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


def _check_method(called: Any, args: Any, named: Mapping[str, Any], budget: Budget) -> None:
    """Refuse a method of a text or a number, which alone take widths, where its result would be too large."""
    owner = getattr(called, "__self__", None)
    if not isinstance(owner, str | bytes | int):
        return
    budget.check_numbers((*args, *named.values()))
    if isinstance(owner, str) and called.__name__ == "replace" and len(args) >= 2:
        budget.check_replace(owner, str(args[0]), str(args[1]))
    elif isinstance(owner, str) and called.__name__ == "join" and args and isinstance(args[0], list | tuple):
        budget.check_text_of(args[0])
        budget.check_length(len(owner) * len(args[0]))


def _writable(value: Any, budget: Budget) -> Any:
    if not isinstance(value, str):
        budget.check_text_of(value)
    return value


def _replace(value: Any, old: Any, new: Any, count: int | None = None, *, budget: Budget) -> str:
    text = str(value)
    budget.check_replace(text, str(old), str(new))
    return text.replace(str(old), str(new), -1 if count is None else count)


def _checked(function: Any, check: Callable[..., None]) -> Any:
    """`function`, refused where `check` of its arguments raises."""

    @wraps(function)
    def checked(*args: Any, **kwargs: Any) -> Any:
        check(*args, **kwargs)
        return function(*args, **kwargs)

    return checked


def _checked_join(function: Any, budget: Budget) -> Any:
    @wraps(function)
    def join(context: Any, value: Any, d: str = "", attribute: Any = None) -> Any:
        items = list(value)
        budget.check_text_of(items)
        budget.check_length(len(str(d)) * len(items))
        return function(context, items, d, attribute)

    return _walking(join, budget)


def _walking(function: Any, budget: Budget) -> Any:
    """`function`, which looks at the clock at every item of the lists it goes over."""

    @wraps(function)
    def walking(*args: Any, **kwargs: Any) -> Any:
        timed = (_timed(each, budget) if isinstance(each, list | tuple | range | Iterator) else each for each in args)
        return function(*timed, **kwargs)

    return walking


def _joined(values: list[Any], budget: Budget) -> str:
    budget.check_text_of(values)
    texts = list(map(str, values))
    budget.check_time()
    budget.check_length(sum(map(len, texts)))
    return "".join(texts)


def _narrow(function: Any, budget: Budget) -> Any:
    """`function`, refused where a number among its arguments is large; its value may be any."""

    @wraps(function)
    def narrow(*args: Any, **kwargs: Any) -> Any:
        budget.check_numbers((*args[1:], *kwargs.values()))
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
