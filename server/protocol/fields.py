"""Fields that requests share, and the one table from them to `SamplingParams`; never knows an endpoint.

A field that the engine gains is added here, as a line in `RequestFields`, or in bounds.py where a chat in the terminal
sets it too; refused.py has those that are not built.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any, Final, Literal

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, ValidationError, field_validator
from pydantic_core import PydanticCustomError

from headrace.engine import InvalidParams, SamplingParams
from headrace.server.errors import ApiError, as_api_error, shape_error
from headrace.server.protocol.bounds import SamplingBounds
from headrace.server.protocol.documented import Also
from headrace.server.protocol.formats import (
    FORMAT_FIELDS,
    Choices,
    FormatFields,
    Schema,
    StructuredOutputs,
    Text,
    format_of,
)
from headrace.server.protocol.refused import check_refused
from headrace.server.settings import ServerSettings

__all__ = ["RequestFields", "StreamOptions", "parse"]

Stop = Annotated[str, StringConstraints(min_length=1, max_length=256)]
Word = Annotated[str, StringConstraints(strict=True, min_length=1, max_length=128)]
Int = Annotated[int, Field(strict=True)]
TokenId = Annotated[int, Field(strict=True, ge=0, lt=2**31)]
Bool = Annotated[bool, Field(strict=True)]
_STOP_SCHEMA: Final = Also({"type": "string", "minLength": 1, "maxLength": 256})
_TOKEN: Final = re.compile(r"[0-9]{1,10}")
_MAX_BIASES: Final = 1024
_MAX_BEAMS: Final = 16
_GREEDY: Final = 1e-5  # logits divided by less than this overflow; the likeliest token is all that is left


class StreamOptions(BaseModel):
    """Options of a stream."""

    include_usage: Bool = False


class RequestFields(SamplingBounds):
    """Fields of both chats and completions, with the values of `SamplingBounds`. Unknown fields are dropped."""

    model_config = ConfigDict(extra="ignore", frozen=True, allow_inf_nan=False)

    model: Annotated[str, Field(strict=True, min_length=1)]
    adapter: Annotated[str, Field(strict=True, min_length=1)] | None = None
    stream: Bool | None = None
    stream_options: StreamOptions | None = None
    n: Annotated[int, Field(strict=True, ge=1)] | None = None
    stop: Annotated[Annotated[tuple[Stop, ...], Field(max_length=4)] | None, _STOP_SCHEMA] = None
    stop_token_ids: Annotated[tuple[Int, ...], Field(max_length=16)] | None = None
    include_stop_str_in_output: Bool | None = None
    skip_special_tokens: Bool | None = None
    ignore_eos: Bool | None = None
    speculate: Bool | None = None
    spaces_between_special_tokens: Bool | None = None
    best_of: Annotated[int, Field(strict=True, ge=1)] | None = None
    logit_bias: dict[str, float] | None = None
    min_tokens: Annotated[int, Field(strict=True, ge=0, lt=2**31)] | None = None
    allowed_token_ids: Annotated[tuple[TokenId, ...], Field(min_length=1, max_length=2**15)] | None = None
    forbidden_token_ids: Annotated[tuple[TokenId, ...], Field(max_length=2**15)] | None = None
    bad_words: Annotated[tuple[Word, ...], Field(max_length=64)] | None = None
    use_beam_search: Bool | None = None
    length_penalty: Annotated[float, Field(strict=True, ge=-10, le=10)] | None = None
    early_stopping: Literal["never"] | Bool | None = None
    response_format: FormatFields | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: Schema | None = None
    guided_regex: Text | None = None
    guided_choice: Choices | None = None
    guided_grammar: Text | None = None
    cache_salt: Annotated[str, StringConstraints(min_length=1, max_length=128, pattern=r"^[ -~]+$")] | None = None
    priority: Annotated[int, Field(strict=True, ge=-1000, le=1000)] | None = None
    user: Annotated[str, Field(strict=True, max_length=512)] | None = None
    metadata: Any = None
    store: Any = None
    service_tier: Any = None

    @field_validator("stop", mode="before")
    @classmethod
    def _one_string_is_a_list_of_one(cls, value: object) -> object:
        if not isinstance(value, str | list | tuple | None):
            raise PydanticCustomError("text_type", "must be a string or a list of strings")
        return (value,) if isinstance(value, str) else value

    @field_validator("logit_bias", mode="before")
    @classmethod
    def _biases_of_tokens(cls, value: object) -> object:
        """Check all biases here, so that an error names the field and not one of its keys."""
        if isinstance(value, dict):
            if len(value) > _MAX_BIASES:
                raise PydanticCustomError("too_long", "at most {most} tokens", {"most": _MAX_BIASES})
            for key, bias in value.items():
                if not _TOKEN.fullmatch(key):
                    raise PydanticCustomError("key", "keys must be token ids in digits, not {key}", {"key": key[:40]})
                if type(bias) not in (int, float) or not -100 <= bias <= 100:
                    message = "the bias of {key} must be from -100 to 100, not {bias}"
                    raise PydanticCustomError("bias", message, {"key": key, "bias": str(bias)[:40]})
        return value

    @property
    def streams(self) -> bool:
        """Whether the client wants events."""
        return bool(self.stream)

    @property
    def include_usage(self) -> bool:
        """Whether a stream ends with usage."""
        return self.stream_options is not None and self.stream_options.include_usage

    def shared(self) -> dict[str, Any]:
        """Return the fields of this class that the request sets, for the body of another endpoint."""
        names = RequestFields.model_fields.keys() - {"metadata", "stream_options"}
        return self.model_dump(include=names, exclude_unset=True, by_alias=True)

    @property
    def choices(self) -> int:
        """Choices that are generated for a prompt; more than `n` where the best are returned."""
        return max(self.best_of or 1, self.n or 1)

    @property
    def format_field(self) -> str | None:
        """Name of the field by which the client asks for a format of the text, if any.

        Raises:
            ApiError: Several fields ask for a format.
        """
        named = [name for name in FORMAT_FIELDS if getattr(self, name) is not None]
        if len(named) > 1:
            raise ApiError(400, "invalid_value", f"{named[1]}: cannot go with {named[0]}", param=named[1])
        return named[0] if named else None

    @property
    def names(self) -> dict[str, str]:
        """Engine's name of a field -> the name that the client used, where they differ."""
        return {"beam_width": "use_beam_search", "response_format": self.format_field or "response_format"}

    def sampling(self, *, max_tokens: int | None, **forced: Any) -> SamplingParams:
        """Return the engine's sampling parameters; `forced` wins over the fields of the request.

        Raises:
            ApiError: A value is out of the engine's range, or two do not go together.
        """
        values = {name: value for name in _PASSED if (value := getattr(self, name)) is not None}
        if values.get("best_of") == (self.n or 1):  # every choice is returned, so nothing is ranked
            del values["best_of"]
        if values.get("temperature", 1.0) < _GREEDY:
            values["temperature"] = 0.0
        if self.use_beam_search:
            values.pop("best_of", None)
            values["beam_width"] = self.choices
        field = self.format_field
        try:
            if field is not None:
                values["response_format"] = format_of(field, getattr(self, field))
            return SamplingParams(**{**values, **forced, "max_tokens": max_tokens})
        except InvalidParams as error:
            raise as_api_error(error, self.names) from None


_PASSED: Final = tuple(
    RequestFields.model_fields.keys() & (SamplingParams.model_fields.keys() - {"max_tokens", "response_format"})
)


def parse(
    shape: type[RequestFields],
    body: dict[str, Any],
    settings: ServerSettings,
    own: Mapping[str, tuple[Any, ...]] | None = None,
) -> Any:
    """Check a body against its shape, and return it as one.

    Args:
        shape: Fields of the endpoint.
        body: The body as the client sent it.
        settings: Settings, of which `strict_fields` and `max_choices` matter.
        own: Fields that this endpoint refuses besides those that all refuse, with the values that ask for nothing.

    Raises:
        ApiError: A field is missing, malformed, out of range, or not supported.
    """
    refused = check_refused(shape, body, own)
    if settings.strict_fields:
        unknown = sorted(body.keys() - refused - shape.model_fields.keys())
        if unknown:
            raise ApiError(400, "unknown_parameter", f"{unknown[0]}: unknown field", param=unknown[0])
    try:
        fields = shape.model_validate(body)
    except ValidationError as error:
        raise shape_error(error) from None
    if settings.strict_fields and (part := _unknown_part(fields, body)):
        raise ApiError(400, "unknown_parameter", f"{part}: unknown field", param=part)
    if fields.stream_options is not None and not fields.streams:
        raise ApiError(400, "invalid_value", "stream_options: only with stream", param="stream_options")
    most = min(settings.max_choices, _MAX_BEAMS) if fields.use_beam_search else settings.max_choices
    for name, count in (("n", fields.n), ("best_of", fields.best_of)):
        if count is not None and count > most:
            raise ApiError(400, "invalid_value", f"{name}: at most {most} here, got {count}", param=name)
    _check_best_of(fields)
    return fields


def _check_best_of(fields: RequestFields) -> None:
    best_of, choices = fields.best_of, fields.n or 1
    if best_of is None or best_of == choices:
        return
    if best_of < choices:
        raise ApiError(400, "invalid_value", f"best_of: must be at least n ({choices}), got {best_of}", param="best_of")
    if fields.streams and not fields.use_beam_search:
        message = "best_of: is ranked when all is generated and cannot be streamed"
        raise ApiError(400, "invalid_value", message, param="best_of")


def _unknown_part(fields: BaseModel, given: Mapping[str, Any]) -> str | None:
    """Return the path of the first unknown field inside the objects in `given`, whose own fields do not count."""
    for name in type(fields).model_fields:
        value, raw = getattr(fields, name), given.get(name)
        parts = [("", value, raw)]
        if isinstance(value, tuple) and isinstance(raw, list):
            parts = [(f"[{place}]", *pair) for place, pair in enumerate(zip(value, raw, strict=True))]
        for place, shape, part in parts:
            if isinstance(shape, BaseModel) and isinstance(part, Mapping):
                unknown = min(part.keys() - type(shape).model_fields.keys(), default=None)
                unknown = unknown or _unknown_part(shape, part)
                if unknown:
                    return f"{name}{place}.{unknown}"
    return None
