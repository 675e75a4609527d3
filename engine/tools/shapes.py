"""`CallShape` and `CallStructure`: how calls that are forced are written, as plain values; never compile a grammar."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

__all__ = ["CallShape", "CallStructure"]


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
