"""Response formats as OpenAI's and vLLM's APIs write them, as the engine's `ResponseFormat`; makes no grammars.

forced.py makes the grammars for forced calls and reasoning.
"""

from __future__ import annotations

from typing import Annotated, Any, Final, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError

from headrace.engine import InvalidParams, ResponseFormat

__all__ = ["FORMAT_FIELDS", "FormatFields", "JsonSchema", "StructuredOutputs", "format_of"]

_MAX_CHOICES_LENGTH: Final = 2**16
Schema = dict[str, Any] | Annotated[str, Field(strict=True)]
Choices = Annotated[tuple[Annotated[str, Field(strict=True, min_length=1)], ...], Field(min_length=1, max_length=4096)]
Text = Annotated[str, Field(strict=True, min_length=1)]


class _Strict(BaseModel):
    """A body whose unknown fields are refused, since a forgotten one would change the answer."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class JsonSchema(_Strict):
    """A JSON schema and its name."""

    name: Annotated[str, Field(strict=True, min_length=1, max_length=128)] | None = None
    description: Annotated[str, Field(strict=True)] | None = None
    json_schema: dict[str, Any] = Field(alias="schema")
    strict: Annotated[bool, Field(strict=True)] | None = None
    """Field of OpenAI's API without effect: answers always follow the schema."""


class FormatFields(_Strict):
    """OpenAI's `response_format`."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None

    @model_validator(mode="after")
    def _a_schema_where_one_belongs(self) -> FormatFields:
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise PydanticCustomError("json_schema", "json_schema goes with the type json_schema, and only with it")
        return self


class StructuredOutputs(_Strict):
    """vLLM's `structured_outputs`, with exactly one of its fields."""

    json_schema: Schema | None = Field(None, alias="json")
    regex: Text | None = None
    choice: Choices | None = None
    grammar: Text | None = None
    json_object: Literal[True] | None = None

    @model_validator(mode="after")
    def _one_of_them(self) -> StructuredOutputs:
        if len(self.model_fields_set) != 1 or getattr(self, next(iter(self.model_fields_set))) is None:
            raise PydanticCustomError("structured_outputs", "give one of json, regex, choice, grammar and json_object")
        return self


FORMAT_FIELDS: Final = (
    "response_format",
    "structured_outputs",
    "guided_json",
    "guided_regex",
    "guided_choice",
    "guided_grammar",
)
"""Fields that ask for a format of the text; a request has at most one of them."""


def format_of(field: str, value: Any) -> ResponseFormat | None:
    """Return the format that one of `FORMAT_FIELDS` asks for; None where it asks for none.

    Raises:
        InvalidParams: The format is too long, or is not valid.
    """
    if isinstance(value, FormatFields):
        if value.json_schema is not None:
            return ResponseFormat.json_schema(value.json_schema.json_schema)
        return ResponseFormat.json_object() if value.type == "json_object" else None
    if isinstance(value, StructuredOutputs):
        (kind,) = value.model_fields_set
        return _made(kind, getattr(value, kind))
    return _made(field.removeprefix("guided_"), value)


def _made(kind: str, value: Any) -> ResponseFormat:
    if kind == "json_object":
        return ResponseFormat.json_object()
    if kind == "regex":
        return ResponseFormat.regex(value)
    if kind == "choice":
        if sum(map(len, value)) > _MAX_CHOICES_LENGTH:
            message = f"response_format: the choices may have {_MAX_CHOICES_LENGTH} characters together"
            raise InvalidParams(message, field="response_format", value=None, limit=_MAX_CHOICES_LENGTH)
        return ResponseFormat.choice(value)
    if kind == "grammar":
        if "::=" in value:
            message = "response_format: grammars are in the syntax of the Lark library, with `rule: ...`"
            raise InvalidParams(message, field="response_format", value=value)
        return ResponseFormat.lark(value)
    return ResponseFormat.json_schema(value)
