"""Grammars of whole answers: reasoning, and then tool calls or content in a demanded format; compiles none.

headrace.engine.tools says how calls are written; this module makes a grammar of that in Lark's syntax.
"""

from __future__ import annotations

import json
import re
from typing import Any, Final

from headrace.engine import InvalidParams, ResponseFormat
from headrace.engine.grammar.json_schemas import JSON_STYLE, without_others
from headrace.engine.tools import CallShape, CallStructure, ReasoningMode, ReasoningTags
from headrace.server.protocol.arguments import can_be_written, written_call

__all__ = ["answer_format", "checked"]

_BEFORE: Final[dict[ReasoningMode, str]] = {
    "none": "",
    "tagged": r"(%s reasoning /\n{0,2}/)? ",
    "opened": r"reasoning /\n{0,2}/ ",
}


def checked(structure: CallStructure | None) -> CallStructure | None:
    """Return the structure of calls if a grammar can describe them.

    Raises:
        InvalidParams: No grammar here can describe such calls; the error names `tool_choice`.
    """
    if structure is not None and not all(map(_can_be_forced, structure.calls)):
        raise InvalidParams("calls of this format cannot be forced", field="tool_choice", value=None)
    return structure


def answer_format(
    wanted: ResponseFormat | None,
    calls: CallStructure | None,
    reasoning: ReasoningMode,
    tags: ReasoningTags | None = None,
) -> ResponseFormat | None:
    """Return the format of the whole text, which may begin with reasoning.

    Args:
        wanted: Format of the content; None allows no content where there are `calls`, and any where there are none.
        calls: Structure of the calls that may replace the content.
        reasoning: The way in which reasoning begins, if the text may begin with any.
        tags: Marks of the reasoning; None stands for `<think>` and `</think>`.

    Raises:
        InvalidParams: The client's own grammar cannot be combined with calls or reasoning, or the whole is too long;
            the error names `response_format`.
    """
    if calls is None and (wanted is None or reasoning == "none"):
        return wanted
    answers = [name for name, part in (("content", wanted), ("calls", calls)) if part is not None]
    tags, before = tags or ReasoningTags(), _BEFORE[reasoning]
    if reasoning == "tagged":
        before %= _literal(tags.opens[0])
    rules = [f"start: {before}({' | '.join(answers)})"]
    if reasoning != "none":
        rules.append(f"reasoning[suffix={_literal(tags.closes[0])}]: /(?s:.*)/")
    if wanted is not None:
        around = tags.answer if tags.answer is not None and reasoning != "none" else ("", "")
        before, after = (f"({_literal(mark)})?" if mark else "" for mark in around)
        rules.append(f"content: {before} {_content(wanted)} {after}")
    if calls is not None:
        rules += _calls(calls)
    return ResponseFormat.lark("\n".join(rules))


def _content(wanted: ResponseFormat) -> str:
    if wanted.kind in ("json_schema", "json_object"):
        return _json(json.loads(wanted.source))
    if wanted.kind == "lark":
        message = "response_format: a grammar cannot go with tools, nor with the reasoning of this model"
        raise InvalidParams(message, field="response_format", value=None)
    escaped = re.sub(r"\\.|[/\n]", lambda found: {"/": r"\/", "\n": r"\n"}.get(found[0], found[0]), wanted.source)
    return f"/{escaped}/"


def _calls(structure: CallStructure) -> list[str]:
    more = f"({_literal(structure.separator)} call)*" if structure.maximum is None else ""
    parts = [_literal(structure.opening), "call", more, _literal(structure.closing)]
    return [
        f"calls: {' '.join(part for part in parts if part)}",
        "call: " + " | ".join(f"call{index}" for index in range(len(structure.calls))),
        *(rule for index, shape in enumerate(structure.calls) for rule in _call(shape, f"call{index}")),
    ]


def _can_be_forced(shape: CallShape) -> bool:
    return shape.style == "json" or can_be_written(shape)


def _call(shape: CallShape, name: str) -> list[str]:
    if shape.style != "json":
        return written_call(shape, name, lambda schema: _json(without_others(schema)))
    arguments = _json(without_others({"type": "object", **shape.schema}))
    return [f"{name}: " + " ".join(part for part in (_literal(shape.before), arguments, _literal(shape.after)) if part)]


def _json(schema: dict[str, Any]) -> str:
    return "%json " + json.dumps({**schema, "x-guidance": JSON_STYLE}, ensure_ascii=False)


def _literal(text: str) -> str:
    return json.dumps(text) if text else ""
