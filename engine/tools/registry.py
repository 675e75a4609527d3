"""Formats of tool calls by name and by chat template; never parses a completion itself.

Names are global to the process, so that a library can add a format once; a parser class can be used without a name.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Final

from headrace.engine.errors import InvalidParams
from headrace.engine.tools.definitions import Tool
from headrace.engine.tools.events import Event, Parsed, collect
from headrace.engine.tools.formats.cohere import Cohere
from headrace.engine.tools.formats.deepseek import DeepSeekV3, DeepSeekV31
from headrace.engine.tools.formats.fences import ToolCode
from headrace.engine.tools.formats.functions import Qwen3Coder, SeedOss
from headrace.engine.tools.formats.gemma import Gemma4
from headrace.engine.tools.formats.glm import Glm4, Glm45
from headrace.engine.tools.formats.harmony import Harmony
from headrace.engine.tools.formats.hermes import Hermes
from headrace.engine.tools.formats.lists import Granite, Hunyuan, Phi4Mini
from headrace.engine.tools.formats.llama import LlamaJson
from headrace.engine.tools.formats.mistral import Mistral, MistralArgs
from headrace.engine.tools.formats.pythonic import Olmo3, Pythonic
from headrace.engine.tools.parser import ReasoningMode, ToolParser
from headrace.engine.tools.reasoning import THINK, ReasoningTags, find_tags

__all__ = ["Detected", "detect", "format_names", "make_parser", "parse", "parser_class", "reasoning_mode", "register"]

_SWITCHES: Final = ("enable_thinking", "reasoning_effort")

_formats: dict[str, type[ToolParser]] = {
    "hermes": Hermes,
    "mistral": Mistral,
    "mistral_args": MistralArgs,
    "llama3_json": LlamaJson,
    "pythonic": Pythonic,
    "olmo3": Olmo3,
    "tool_code": ToolCode,
    "glm4": Glm4,
    "glm45": Glm45,
    "qwen3_coder": Qwen3Coder,
    "seed_oss": SeedOss,
    "deepseek_v3": DeepSeekV3,
    "deepseek_v31": DeepSeekV31,
    "granite": Granite,
    "phi4_mini_json": Phi4Mini,
    "hunyuan_a13b": Hunyuan,
    "cohere": Cohere,
    "harmony": Harmony,
    "gemma4": Gemma4,
}


@dataclass(frozen=True, slots=True)
class Detected:
    """Properties of a model that its chat template reveals."""

    tools: str | None
    """Name of the format of tool calls; None if the template has none or an unknown one."""
    reasoning: bool
    """Whether completions may hold reasoning; `reasoning_mode` tells whether they start inside it."""
    switches: frozenset[str] = frozenset()
    """Subset of `enable_thinking` and `reasoning_effort`: the values that the template reads."""
    tags: ReasoningTags = THINK
    """Marks of the reasoning, if there is any."""


def register(name: str, cls: type[ToolParser]) -> None:
    """Add a format for `make_parser` and `detect`, which tries it before earlier ones.

    Raises:
        InvalidParams: Another class has the name, or `cls` is no subclass of `ToolParser`.
    """
    if not (isinstance(cls, type) and issubclass(cls, ToolParser)):
        raise InvalidParams("a format is a subclass of ToolParser", field="cls", value=cls, limit=None)
    if _formats.setdefault(name, cls) is not cls:
        raise InvalidParams("this name is taken", field="name", value=name, limit=_formats[name].__name__)


def format_names() -> list[str]:
    """Return the names of all formats, in alphabetical order."""
    return sorted(_formats)


def parser_class(name: str | None) -> type[ToolParser]:
    """Return the format called `name`; None stands for the format without calls.

    Raises:
        InvalidParams: No format has that name.
    """
    if name is None:
        return ToolParser
    try:
        return _formats[name]
    except KeyError:
        known = format_names()
        raise InvalidParams(f"must be one of {', '.join(known)}", field="tools", value=name, limit=known) from None


def detect(chat_template: str) -> Detected:
    """Return the format in which a chat template writes tool calls, and whether and how its model reasons."""
    found = None
    for name, cls in reversed(_formats.items()):
        taught = any(marker in chat_template for marker in cls.markers)
        if taught and not any(marker in chat_template for marker in cls.foreign_markers):
            found = name
            break
    switches = frozenset(name for name in _SWITCHES if re.search(rf"\b{name}\b", chat_template))
    tags = find_tags(chat_template)
    return Detected(found, tags is not None, switches, tags or THINK)


def reasoning_mode(detected: Detected, prompt: str) -> ReasoningMode:
    """Return the reasoning mode of a completion of the rendered `prompt`, which may open the reasoning itself."""
    if not detected.reasoning:
        return "none"
    return "opened" if detected.tags.end(prompt) else "tagged"


def make_parser(
    tools: str | None = None,
    reasoning: ReasoningMode = "none",
    make_id: Callable[[int], str] | None = None,
    *,
    tags: ReasoningTags = THINK,
    offered: Iterable[Tool] = (),
) -> ToolParser:
    """Return a parser for one completion.

    The arguments are those of `parser_class` and `ToolParser`, whose `tools` are called `offered` here.
    """
    return parser_class(tools)(reasoning, make_id, tags=tags, tools=offered)


def parse(
    text: str,
    tools: str | None = None,
    reasoning: ReasoningMode = "none",
    make_id: Callable[[int], str] | None = None,
    *,
    tags: ReasoningTags = THINK,
    offered: Iterable[Tool] = (),
) -> Parsed:
    """Parse a whole completion; the arguments are those of `make_parser`, and the result is the same as for pieces."""
    parser = make_parser(tools, reasoning, make_id, tags=tags, offered=offered)
    events: list[Event] = [*parser.feed(text), *parser.finish()]
    return collect(events)
