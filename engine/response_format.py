"""`ResponseFormat`: a constraint on the text of a completion, checked as far as possible without compiling it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from reprlib import repr as repr_of
from typing import Annotated, Any, Final, Literal, Self

from pydantic import (
    BaseModel,
    ConfigDict,
    PrivateAttr,
    PydanticUserError,
    StringConstraints,
    TypeAdapter,
    model_validator,
)

from headrace.engine.errors import InvalidParams
from headrace.engine.grammar.json_schemas import closed_schema

__all__ = ["ResponseFormat"]

_MAX_LENGTH: Final = 2**16
_PUNCTUATION: Final = frozenset("\\.+*?()|[]{}^$/-#&~")
_KINDS: Final = ("json_schema", "json_object", "regex", "lark", "choice")


class ResponseFormat(BaseModel):
    """Constraint on the text of a completion. Frozen, hashable, serialisable; made by one of the methods below.

    A mapping is accepted, too, such as `{"type": "json_schema", "json_schema": {"schema": {...}}}`,
    `{"type": "json_object"}`, or `{"type": kind, kind: ...}` with another kind.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    kind: Literal["json_schema", "json_object", "regex", "lark", "choice"]
    source: Annotated[str, StringConstraints(min_length=1, max_length=_MAX_LENGTH)]
    """JSON schema, regular expression or grammar as text; for a choice, a regular expression."""
    _described: Any = PrivateAttr(default=None)

    @property
    def described(self) -> Any:
        """Class that `json_schema` was given, whose instances the text describes; None if it was given none."""
        return self._described

    @classmethod
    def json_schema(cls, schema: Mapping[str, Any] | str | type[Any]) -> Self:
        """Return a format for JSON that satisfies `schema`, with properties in its order.

        Args:
            schema: A JSON schema; or a pydantic model, a dataclass or a `TypedDict`, whose objects then have all their
                properties and no others, as in OpenAI's strict mode. `Completion.parsed` is an instance of it.

        Raises:
            InvalidParams: `schema` is no JSON object, or a class that no JSON schema describes.
        """
        if isinstance(schema, type):
            made = cls._make("json_schema", _schema_of(schema))
            made._described = schema
            return made
        try:
            value = json.loads(schema) if isinstance(schema, str) else schema
            if not isinstance(value, Mapping):
                raise TypeError("it is no object")
            text = json.dumps(dict(value), ensure_ascii=False, allow_nan=False)
        except (TypeError, ValueError, RecursionError) as error:
            raise _refused(f"the schema is no JSON: {error}", schema) from None
        return cls._make("json_schema", text)

    @classmethod
    def json_object(cls) -> Self:
        """Return a format for any JSON object."""
        return cls._make("json_object", '{"type": "object"}')

    @classmethod
    def regex(cls, pattern: str) -> Self:
        """Return a format for text that a regular expression (in Rust's syntax) matches as a whole."""
        return cls._make("regex", pattern)

    @classmethod
    def lark(cls, grammar: str) -> Self:
        """Return a format for text of a context-free grammar, in Lark's EBNF, from its rule `start`."""
        return cls._make("lark", grammar)

    @classmethod
    def choice(cls, texts: Sequence[str]) -> Self:
        """Return a format for exactly one of `texts`.

        Raises:
            InvalidParams: `texts` is empty, or one of them is empty or not a string.
        """
        if (
            isinstance(texts, str)
            or not isinstance(texts, Sequence)
            or not all(isinstance(text, str) and text for text in texts)
            or not texts
        ):
            raise _refused("a choice is of at least one text, none of them empty", texts)
        return cls._make("choice", "|".join(map(_escaped, texts)))

    @classmethod
    def _make(cls, kind: str, source: Any) -> Self:
        if not isinstance(source, str) or not 0 < len(source) <= _MAX_LENGTH:
            raise _refused(f"{kind} must be text of 1 to {_MAX_LENGTH} characters", source, _MAX_LENGTH)
        if any("\ud800" <= char <= "\udfff" for char in source):
            raise _refused(f"{kind} must not hold surrogates", source)
        return cls(kind=kind, source=source)  # type: ignore[arg-type]

    @model_validator(mode="before")
    @classmethod
    def _from_openai(cls, value: Any) -> Any:
        if not isinstance(value, Mapping) or "type" not in value:
            return value
        kind = value["type"]
        given = value.get(kind) if kind in _KINDS else None
        if value == {"type": "json_object"}:
            return cls.json_object().model_dump()
        if given is None or kind == "json_object" or len(value) != 2:
            raise _refused(f"type must be one of {', '.join(_KINDS)}, with what it needs under the same name", value)
        if kind == "json_schema":
            given = given.get("schema") if isinstance(given, Mapping) else None
        return getattr(cls, kind)(given).model_dump()


def _schema_of(described: type[Any]) -> str:
    try:
        schema = TypeAdapter(described).json_schema()
    except PydanticUserError as error:
        raise _refused(f"no JSON schema describes this class: {str(error).splitlines()[0]}", described) from None
    return json.dumps(closed_schema(schema), ensure_ascii=False)


def _escaped(text: str) -> str:
    return "".join("\\" + char if char in _PUNCTUATION else char for char in text)


def _refused(what: str, value: object, limit: object = None) -> InvalidParams:
    message = f"response_format: {what}, got {repr_of(value)}"
    return InvalidParams(message, field="response_format", value=value, limit=limit)
