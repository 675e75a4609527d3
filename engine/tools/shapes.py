"""`CallShape` and `CallStructure`: the written form of forced calls, as plain values; never compile a grammar."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

__all__ = ["ArgumentTags", "CallShape", "CallStructure"]


class ArgumentTags(NamedTuple):
    """Literal text around the arguments of a call that are written one by one: `before` name `between` value `after`.

    No value contains `after`; `last` follows it.
    """

    before: str
    between: str
    after: str
    last: str


@dataclass(frozen=True, slots=True)
class CallShape:
    """Written form of the calls of one tool: `before`, then arguments that satisfy `schema`, then `after`.

    In style `json` the arguments are one JSON object. In style `keywords` they are `name=value` for each property that
    is present, separated by ", ", with values as Python writes them. In style `tagged` each property that is present
    is written between `tags`, in the order of the schema: strings as they are, and all else as JSON. In style `marked`
    they are `name:value` for each property that is present, separated by ",", with strings as they are between marks
    `<|"|>`, names of inner properties bare, and all else as JSON.
    """

    name: str
    before: str
    schema: dict[str, Any]
    after: str
    style: Literal["json", "keywords", "tagged", "marked"] = "json"
    tags: ArgumentTags | None = None


@dataclass(frozen=True, slots=True)
class CallStructure:
    """A completion of calls alone: `opening`, then 1 to `maximum` of `calls` with `separator` between, then `closing`.

    All strings are literal. A `maximum` of None is no limit. Reasoning, if the model has any, comes before.
    """

    opening: str
    calls: tuple[CallShape, ...]
    separator: str
    closing: str
    maximum: int | None
