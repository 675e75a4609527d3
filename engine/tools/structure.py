"""`call_structure` decides which calls a request forces; it compiles no grammar."""

from __future__ import annotations

from collections.abc import Sequence

from headrace.engine.errors import InvalidParams
from headrace.engine.tools.definitions import Tool, ToolChoice
from headrace.engine.tools.parser import ToolParser
from headrace.engine.tools.shapes import CallShape, CallStructure

__all__ = ["call_structure"]


def call_structure(
    parser: type[ToolParser], tools: Sequence[Tool], choice: ToolChoice, parallel: bool = True
) -> CallStructure | None:
    """Return the structure that a grammar must force on the completion; None if `choice` leaves the model free.

    Args:
        parser: Format of the calls, for instance `parser_class("hermes")`.
        tools: Tools of the request.
        choice: Choice of the request: `required` forces calls of any tools, `named` one call of that tool.
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
