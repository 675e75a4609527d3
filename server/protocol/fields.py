"""Fields that requests share, and the one table from them to `SamplingParams`; never knows an endpoint.

A field that the engine gains is added here: a line in `Sampling`, and its name taken out of the refused ones.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Final

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, ValidationError, field_validator

from headrace.engine import SamplingParams
from headrace.server.errors import ApiError, shape_error
from headrace.server.settings import ServerSettings

__all__ = ["REFUSED", "RequestFields", "StreamOptions", "parse"]

Stop = Annotated[str, StringConstraints(min_length=1, max_length=256)]
Int = Annotated[int, Field(strict=True)]
Bool = Annotated[bool, Field(strict=True)]
_INT64: Final = 2**63
_GREEDY: Final = 1e-5  # logits divided by less than this overflow; the likeliest token is all that is left

REFUSED: Final[Mapping[str, tuple[Any, ...]]] = {
    "audio": (),
    "best_of": (1,),
    "chat_template": (),
    "chat_template_kwargs": ({},),
    "continue_final_message": (False,),
    "custom_logit_processor": (),
    "documents": (),
    "frequency_penalty": (0, 0.0),
    "function_call": ("none",),
    "functions": ([],),
    "guided_choice": (),
    "guided_grammar": (),
    "guided_json": (),
    "guided_regex": (),
    "logit_bias": ({},),
    "logits_processors": (),
    "logprobs": (False,),
    "min_tokens": (0,),
    "modalities": (["text"],),
    "parallel_tool_calls": (True,),
    "prediction": (),
    "presence_penalty": (0, 0.0),
    "prompt_embeds": (),
    "prompt_logprobs": (),
    "repetition_penalty": (1, 1.0),
    "response_format": ({"type": "text"},),
    "structured_outputs": (),
    "suffix": ("",),
    "top_logprobs": (0,),
    "use_beam_search": (False,),
}
"""Fields that change the answer and are not built, each with the values that ask for nothing; so does null."""


class StreamOptions(BaseModel):
    """How a stream reports usage."""

    include_usage: Bool = False


class RequestFields(BaseModel):
    """What chats and completions both take. Unknown fields are dropped."""

    model_config = ConfigDict(extra="ignore", frozen=True, allow_inf_nan=False)

    model: Annotated[str, Field(strict=True, min_length=1)]
    stream: Bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: Annotated[int, Field(strict=True, ge=1, lt=2**31)] | None = None
    n: Annotated[int, Field(strict=True, ge=1, le=128)] | None = None
    temperature: Annotated[float, Field(strict=True, ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(strict=True, gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(strict=True, ge=-1, lt=2**31)] | None = None
    min_p: Annotated[float, Field(strict=True, ge=0, le=1)] | None = None
    seed: Annotated[int, Field(strict=True, ge=-_INT64, lt=_INT64)] | None = None
    stop: Annotated[tuple[Stop, ...], Field(max_length=4)] | None = None
    stop_token_ids: Annotated[tuple[Int, ...], Field(max_length=16)] | None = None
    include_stop_str_in_output: Bool | None = None
    skip_special_tokens: Bool | None = None
    ignore_eos: Bool | None = None
    cache_salt: Annotated[str, StringConstraints(min_length=1, max_length=128, pattern=r"^[ -~]+$")] | None = None
    priority: Annotated[int, Field(strict=True, ge=-1000, le=1000)] | None = None
    user: Annotated[str, Field(strict=True, max_length=512)] | None = None
    metadata: Any = None
    store: Any = None
    service_tier: Any = None

    @field_validator("stop", mode="before")
    @classmethod
    def _one_string_is_a_list_of_one(cls, value: object) -> object:
        return (value,) if isinstance(value, str) else value

    @property
    def streams(self) -> bool:
        """Whether events are wanted."""
        return bool(self.stream)

    @property
    def include_usage(self) -> bool:
        """Whether a stream ends with usage."""
        return self.stream_options is not None and self.stream_options.include_usage

    def shared(self) -> dict[str, Any]:
        """The fields of this class that the request sets, as another endpoint's body has them."""
        names = RequestFields.model_fields.keys() - {"metadata", "stream_options"}
        return self.model_dump(include=names, exclude_unset=True, by_alias=True)

    def sampling(self, *, max_tokens: int | None, **forced: Any) -> SamplingParams:
        """What the engine is asked for; `forced` wins over what the request says.

        Raises:
            InvalidParams: A value is out of the engine's range.
        """
        values = {name: value for name in _PASSED if (value := getattr(self, name)) is not None}
        if values.get("top_k") == -1:
            values["top_k"] = 0
        if values.get("temperature", 1.0) < _GREEDY:
            values["temperature"] = 0.0
        return SamplingParams(**{**values, **forced, "max_tokens": max_tokens})


_PASSED: Final = tuple(RequestFields.model_fields.keys() & (SamplingParams.model_fields.keys() - {"max_tokens"}))


def parse(
    shape: type[RequestFields],
    body: dict[str, Any],
    settings: ServerSettings,
    neutral: Mapping[str, tuple[Any, ...]] | None = None,
) -> Any:
    """Check a body against its shape.

    Args:
        shape: Of the endpoint.
        body: As it came.
        settings: For `strict_fields` and `max_choices`.
        neutral: Of the endpoint's own refused fields, and of those in `REFUSED` for which they differ there, the
            values that ask for nothing.

    Raises:
        ApiError: A field is missing, malformed, out of range, or not supported.
    """
    own = neutral or {}
    refused = {**REFUSED, **own}
    for name in body.keys() & (REFUSED.keys() - shape.model_fields.keys() | own.keys()):
        if not _asks_nothing(body[name], refused[name]):
            raise ApiError(400, "unsupported_parameter", f"{name}: this server does not support it", param=name)
    if settings.strict_fields:
        unknown = sorted(body.keys() - refused.keys() - shape.model_fields.keys())
        if unknown:
            raise ApiError(400, "unknown_parameter", f"{unknown[0]}: unknown field", param=unknown[0])
    try:
        fields = shape.model_validate(body)
    except ValidationError as error:
        raise shape_error(error) from None
    if fields.stream_options is not None and not fields.streams:
        raise ApiError(400, "invalid_value", "stream_options: only with stream", param="stream_options")
    if fields.n is not None and fields.n > settings.max_choices:
        raise ApiError(400, "invalid_value", f"n: at most {settings.max_choices} here, got {fields.n}", param="n")
    return fields


def _asks_nothing(value: Any, neutral: tuple[Any, ...]) -> bool:
    return value is None or any(type(value) is type(each) and value == each for each in neutral)
