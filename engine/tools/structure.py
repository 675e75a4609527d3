"""How a forced call is written, for the grammar that forces it; never compiles a grammar."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from headrace.engine.errors import InvalidParams
from headrace.engine.tools.definitions import Tool, ToolChoice
from headrace.engine.tools.parser import ToolParser

__all__ = ["CallShape", "CallStructure", "call_structure"]


@dataclass(frozen=True, slots=True)
class CallShape:
    """The calls of one tool: `before`, then arguments that satisfy `schema`, then `after`.

    In style `json` the arguments are one JSON object. In style `keywords` they are `name=value` for each property that
    is present, separated by ", ", with values as Python writes them.
    """

    name: str
    before: str
    schema: dict[str, Any]
    after: str
    style: Literal["json", "keywords"] = "json"


@dataclass(frozen=True, slots=True)
class CallStructure:
    """A completion that consists of calls: `opening`, one to `maximum` of `calls` with `separator` between, `closing`.

    All strings are literal. `maximum` None is without limit. Reasoning, if the model has any, comes before.
    """

    opening: str
    calls: tuple[CallShape, ...]
    separator: str
    closing: str
    maximum: int | None


def call_structure(
    parser: type[ToolParser], tools: Sequence[Tool], choice: ToolChoice, parallel: bool = True
) -> CallStructure | None:
    """Return what a grammar must hold the completion to; None where `choice` leaves the model free.

    Args:
        parser: The format, for instance `parser_class("hermes")`.
        tools: Those of the request.
        choice: `required` allows any of them, once or more; `named` one call of that one.
        parallel: Whether `required` allows several calls.

    Raises:
        InvalidParams: The choice asks for no known tool, or the format cannot be forced.
    """
    allowed = choice.allowed(tools)
    if choice.mode in ("none", "auto"):
        return None
    maximum = None if parallel and choice.mode == "required" else 1
    structure = parser.structure(tuple(CallShape(tool.name, "", tool.parameters, "") for tool in allowed), maximum)
    if structure is None:
        raise InvalidParams(
            "calls of this format cannot be forced", field="tool_choice", value=choice.mode, limit=parser.__name__
        )
    return structure
