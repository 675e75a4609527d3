"""Grammars for all that a model writes in one answer: reasoning, then calls, or what a format demands; compiles none.

The text of a format of calls is the engine's (headrace.engine.tools); here it becomes a grammar in Lark's syntax.
"""

from __future__ import annotations

import json
import re
from typing import Any, Final

from headrace.engine import InvalidParams, ResponseFormat
from headrace.engine.grammar.json_schemas import JSON_STYLE, without_others
from headrace.engine.tools import CallShape, CallStructure, ReasoningMode

__all__ = ["answer_format", "checked"]

_BEFORE: Final[dict[ReasoningMode, str]] = {
    "none": "",
    "tagged": r'("<think>" reasoning /\n{0,2}/)? ',
    "opened": r"reasoning /\n{0,2}/ ",
}
_REASONING: Final = r'reasoning[suffix="</think>"]: /(?s:.*)/'


def checked(structure: CallStructure | None) -> CallStructure | None:
    """Return the structure of calls, once it is known that a grammar can say them.

    Raises:
        InvalidParams: No grammar here can say such calls; names `tool_choice`.
    """
    if structure is not None and any(shape.style != "json" for shape in structure.calls):
        raise InvalidParams("calls of this format cannot be forced", field="tool_choice", value=None)
    return structure


def answer_format(
    wanted: ResponseFormat | None, calls: CallStructure | None, reasoning: ReasoningMode
) -> ResponseFormat | None:
    """What the whole text must be, given that it may begin with reasoning.

    Args:
        wanted: What the content must be; None allows no content where there are `calls`, and any where there are none.
        calls: What the text may be instead.
        reasoning: What comes before, in the model's own words.

    Raises:
        InvalidParams: A grammar of the client's own cannot be put together with anything, or all is too long; names
            `response_format`.
    """
    if calls is None and (wanted is None or reasoning == "none"):
        return wanted
    answers = [name for name, part in (("content", wanted), ("calls", calls)) if part is not None]
    rules = [f"start: {_BEFORE[reasoning]}({' | '.join(answers)})"]
    if reasoning != "none":
        rules.append(_REASONING)
    if wanted is not None:
        rules.append(f"content: {_content(wanted)}")
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
        *(f"call{index}: {_call(shape)}" for index, shape in enumerate(structure.calls)),
    ]


def _call(shape: CallShape) -> str:
    arguments = _json(without_others({"type": "object", **shape.schema}))
    return " ".join(part for part in (_literal(shape.before), arguments, _literal(shape.after)) if part)


def _json(schema: dict[str, Any]) -> str:
    return "%json " + json.dumps({**schema, "x-guidance": JSON_STYLE}, ensure_ascii=False)


def _literal(text: str) -> str:
    return json.dumps(text) if text else ""
