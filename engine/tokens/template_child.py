"""Renders one chat template in a process of its own, within limits of the operating system; tokenises nothing.

Run by child_start.py for `ChatTemplate`; imports nothing of headrace. The first line is `[source, names]`. Each later
line is a chat, `[messages, tools, values]`, where `values` are more variables of the template by name. Each answer is a
line `[kind, text]`: kind is "text", or else "refused", "costly" or "memory" with the reason as its text.

A template is a program that comes with the model. Jinja's sandbox keeps it from everything but its own values, but
nothing there keeps it from computing for ever or building values of any size. So the kernel kills this process when a
line takes too much processor time, and grants it only a limited amount of memory.
"""

from __future__ import annotations

import json
import resource
from collections.abc import Iterator
from datetime import datetime
from typing import Any, Final, NamedTuple

from jinja2 import Template, TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

__all__ = ["answers"]

_NODES: Final = 25_000  # in the syntax tree of a template
_REASON: Final = 500  # characters
_KINDS: Final = frozenset(("string", "iterable", "sequence", "mapping"))
_ADDING: Final = (nodes.Add, nodes.Concat, nodes.Output)
_KEPT: Final = 128 << 20  # bytes of address space that may stay in use for the next line

Answer = tuple[str, str]


class _TooCostly(Exception):
    """The template is too large, or writes too much."""


class _Generation(Extension):
    """Tag `{% generation %}`, which marks the assistant's part for training; here it is transparent."""

    tags = {"generation"}

    def parse(self, parser: Any) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body).set_lineno(line)


def _compile(source: str) -> tuple[Template, _Needs]:
    """Compile a template with the functions that transformers gives to chat templates, and find what it needs.

    Raises:
        _TooCostly: The template has too many nodes.
        TemplateError: The template is not valid.
    """
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    tree = environment.parse(source)
    left: list[nodes.Node] = [tree]
    count = 0
    while left:
        left += left.pop().iter_child_nodes()
        count += 1
        if count > _NODES:
            raise _TooCostly(f"the chat template has more than {_NODES} nodes")
    return environment.from_string(tree), _Needs.of(tree)


class _Needs(NamedTuple):
    """What a template expects in another form than most templates do, as its syntax tree shows."""

    text_arguments: bool
    """Whether it adds the arguments of calls to other text, as DeepSeek's do, and so expects JSON text."""
    no_content: bool
    """Whether, beside that, it asks if a content is None: then that of a message with calls alone is None."""
    tools_in_message: bool
    """Whether it adds the tools of a message to other text, as Phi-4-mini's does, and reads no tools but those."""
    parts: bool
    """Whether it goes through the parts of a content without asking if that is a text, as Llava's and SmolVLM's do."""

    @classmethod
    def of(cls, tree: nodes.Node) -> _Needs:
        """Return the needs of a template."""
        parents = _lookups(tree, "arguments")
        text_arguments = bool(parents) and all(isinstance(parent, _ADDING) for parent in parents)
        asks = any(isinstance(parent, nodes.Test) and parent.name == "none" for parent in _lookups(tree, "content"))
        adds = any(isinstance(parent, _ADDING) for parent in _lookups(tree, "tools"))
        reads = any(name.name == "tools" for name in tree.find_all(nodes.Name))
        return cls(text_arguments, text_arguments and asks, adds and not reads, _goes_through_parts(tree))


def _goes_through_parts(tree: nodes.Node) -> bool:
    """Return whether a template has a loop over a content, and no test of what a content is."""
    contents = _lookups(tree, "content")
    if any(isinstance(parent, nodes.Test) and parent.name in _KINDS for parent in contents):
        return False
    for loop in tree.find_all(nodes.For):
        over = loop.iter
        while isinstance(over, nodes.Filter) and over.node is not None:
            over = over.node
        if _looks_up(over, "content"):
            return True
    return False


def _lookups(tree: nodes.Node, name: str) -> list[nodes.Node]:
    """Return the node around each place where `name` is looked up in a value."""
    found: list[nodes.Node] = []
    for parent in tree.find_all(nodes.Node):
        found += (parent for child in parent.iter_child_nodes() if _looks_up(child, name))
    return found


def _looks_up(node: nodes.Node, name: str) -> bool:
    """Return whether a node is the lookup of `name` in a value."""
    key = node.arg if isinstance(node, nodes.Getitem) else None
    by_key = isinstance(key, nodes.Const) and key.value == name
    return by_key or (isinstance(node, nodes.Getattr) and node.attr == name)


def _with_text(call: Any) -> Any:
    """Return a call with its arguments as JSON text."""
    function = call["function"]
    if isinstance(function["arguments"], str):
        return call
    return {**call, "function": {**function, "arguments": _to_json(function["arguments"])}}


def _with_tools(messages: list[Any], tools: list[Any]) -> list[Any]:
    """Return messages of which the first is the system's, with the JSON of the tools' functions as its `tools`."""
    first = messages[0] if messages[0]["role"] == "system" else {"role": "system", "content": ""}
    rest = messages[1:] if first is messages[0] else messages
    return [first | {"tools": _to_json([tool["function"] for tool in tools])}, *rest]


def _in_parts(message: dict[str, Any]) -> dict[str, Any]:
    """Return a message whose text is the one part of its content."""
    content = message.get("content")
    return message | {"content": [{"type": "text", "text": content}]} if isinstance(content, str) else message


def _render(template: Template, values: dict[str, Any], most: int) -> str:
    """Return the text that the template writes.

    Raises:
        _TooCostly: The template writes more than `most` characters.
        Exception: The template raised it.
    """
    pieces, length = [], 0
    for piece in template.generate(values):
        length += len(piece)
        if length > most:
            raise _TooCostly(f"the chat template writes more than {most} characters")
        pieces.append(piece)
    return "".join(pieces)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Return JSON as chat templates expect it: Jinja's own filter would escape it for HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    raise TemplateError(message)


class _Renderer:
    """Answers the lines one after another: first the template, then chats."""

    def __init__(self, memory: int, most: int) -> None:
        self._memory = memory
        self._most = most
        self._template: Template | None = None
        self._names: dict[str, Any] = {}
        self._needs = _Needs(False, False, False, False)

    def answer(self, line: bytes) -> bytes:
        """Return the answer to a line, without a line feed."""
        try:
            try:
                answer = "text", self._text(json.loads(line))
                return _encoded(answer)
            except UnicodeEncodeError:
                answer = "refused", "the chat template writes half of a surrogate pair, which UTF-8 cannot express"
            except RecursionError:
                answer = "costly", "the chat template calls itself without end, or nests too deep"
            except _TooCostly as error:
                answer = "costly", str(error)
            except Exception as error:
                answer = "refused", _reason(error)
            return _encoded(answer)
        except MemoryError:
            return _encoded(("memory", f"the chat template needs more than {self._memory >> 20} MiB of memory"))

    def _text(self, line: Any) -> str:
        if self._template is None:
            source, self._names = line
            self._template, self._needs = _compile(source)
            return ""
        messages, tools, values = line
        if tools and self._needs.tools_in_message:
            messages = _with_tools(messages, tools)
        if self._needs.text_arguments:
            messages = [self._adapted(message) if message.get("tool_calls") else message for message in messages]
        if self._needs.parts:
            messages = list(map(_in_parts, messages))
        known = {**self._names, "messages": messages, "tools": tools, "documents": None}
        return _render(self._template, {**values, **known}, self._most)

    def _adapted(self, message: dict[str, Any]) -> dict[str, Any]:
        """Return a message with calls in the form that the template expects."""
        message = message | {"tool_calls": list(map(_with_text, message["tool_calls"]))}
        if self._needs.no_content and not message.get("content"):
            message = message | {"content": None}
        return message


def _reason(error: Exception) -> str:
    if isinstance(error, MemoryError):
        raise error
    return str(error)[:_REASON].encode(errors="replace").decode()


def _encoded(answer: Answer) -> bytes:
    return json.dumps(answer, ensure_ascii=False).encode()


def _address_space() -> int:
    """Return the bytes of address space that this process uses."""
    with open("/proc/self/statm", "rb") as file:
        return int(file.read().split()[0]) * resource.getpagesize()


def _limit(memory: int) -> None:
    """Limit this process to `memory` bytes more than it uses now."""
    hard = resource.getrlimit(resource.RLIMIT_AS)[1]
    most = _address_space() + memory
    most = most if hard == resource.RLIM_INFINITY else min(most, hard)
    resource.setrlimit(resource.RLIMIT_AS, (most, most))


def answers(lines: Iterator[bytes], memory: str, most: str) -> Iterator[bytes]:
    """Answer lines until there are no more, or until so much memory stays in use that later lines would have less.

    Args:
        lines: Input lines. Each has processor time of its own; the process is killed when that is over.
        memory: Bytes that may be in use besides the interpreter.
        most: Most characters that the template may write.
    """
    _limit(int(memory))
    renderer, compiled = _Renderer(int(memory), int(most)), 0
    for line in lines:
        yield renderer.answer(line)
        compiled = compiled or _address_space()
        if _address_space() > compiled + _KEPT:
            return
