"""Tool calls and reasoning in the text of a completion: formats, definitions, choices; never calls a tool."""

from __future__ import annotations

from headrace.engine.tools.definitions import (
    MAX_TOOLS,
    Tool,
    ToolChoice,
    assistant_message,
    check_tools,
    template_tools,
)
from headrace.engine.tools.events import (
    Content,
    End,
    Event,
    Parsed,
    Reasoning,
    ToolCall,
    ToolCallArguments,
    ToolCallEnd,
    ToolCallStart,
    collect,
    merge,
)
from headrace.engine.tools.machine import Malformed, Reading
from headrace.engine.tools.parser import ReasoningMode, ToolParser
from headrace.engine.tools.reasoning import ReasoningTags
from headrace.engine.tools.registry import (
    Detected,
    detect,
    format_names,
    make_parser,
    parse,
    parser_class,
    reasoning_mode,
    register,
)
from headrace.engine.tools.shapes import ArgumentTags, CallShape, CallStructure
from headrace.engine.tools.structure import call_structure

__all__ = [
    "MAX_TOOLS",
    "ArgumentTags",
    "CallShape",
    "CallStructure",
    "Content",
    "Detected",
    "End",
    "Event",
    "Malformed",
    "Parsed",
    "Reading",
    "Reasoning",
    "ReasoningMode",
    "ReasoningTags",
    "Tool",
    "ToolCall",
    "ToolCallArguments",
    "ToolCallEnd",
    "ToolCallStart",
    "ToolChoice",
    "ToolParser",
    "assistant_message",
    "call_structure",
    "check_tools",
    "collect",
    "detect",
    "format_names",
    "make_parser",
    "merge",
    "parse",
    "parser_class",
    "reasoning_mode",
    "register",
    "template_tools",
]
