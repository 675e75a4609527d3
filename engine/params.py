"""`SamplingParams`: what shapes the tokens of one request, checked when it is built; never who asks or how."""

from __future__ import annotations

from typing import Annotated, Any, get_args

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, ValidationError, field_validator

from headrace.engine.errors import InvalidParams

__all__ = ["SamplingParams", "invalid_params"]

_INT64 = 2**63
_MAX_CHOICES = 128
_MAX_STOPS = 16
_MAX_STOP_LENGTH = 1024
_BOUNDS = {"gt": "above", "ge": "at least", "lt": "below", "le": "at most"}
_LIMITS = (*_BOUNDS, "max_length", "min_length", "expected")

StopString = Annotated[str, StringConstraints(min_length=1, max_length=_MAX_STOP_LENGTH)]
StopToken = Annotated[int, Field(ge=0, lt=2**31, strict=True)]


class SamplingParams(BaseModel):
    """How to choose tokens and when to stop. Frozen, hashable, serialisable.

    Raises:
        InvalidParams: A value is out of its range; names field, value and limit. It is also a `ValueError`.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    n: Annotated[int, Field(ge=1, le=_MAX_CHOICES, strict=True)] = 1
    """Independent choices for the prompt; its pages are computed once and shared."""
    temperature: Annotated[float, Field(ge=0.0)] = 1.0
    """0 is greedy. Sampling divides the logits by it."""
    top_k: Annotated[int, Field(ge=0, lt=2**31, strict=True)] = 0
    """Sample among this many most likely tokens; 0 is all of them."""
    top_p: Annotated[float, Field(gt=0.0, le=1.0)] = 1.0
    """Sample among the fewest most likely tokens whose probabilities reach this sum (after `top_k`)."""
    min_p: Annotated[float, Field(ge=0.0, le=1.0)] = 0.0
    """Drop tokens less likely than this fraction of the most likely one."""
    seed: Annotated[int, Field(ge=-_INT64, lt=_INT64, strict=True)] | None = None
    """Same seed, same tokens, whatever else runs. None draws one from the engine's seed."""
    max_tokens: Annotated[int, Field(ge=1, lt=2**31, strict=True)] | None = None
    """None runs to the limit of the context or of the page pool and ends with `length`."""
    stop: Annotated[tuple[StopString, ...], Field(max_length=_MAX_STOPS)] = ()
    """Strings that end the choice; the text is cut just before the first of them. A single string is accepted."""
    stop_token_ids: Annotated[tuple[StopToken, ...], Field(max_length=_MAX_STOPS)] = ()
    """Token ids that end the choice, besides the model's own end-of-sequence ids."""
    include_stop_str_in_output: bool = False
    """Keep the stop string, or the text of the stop token, at the end of the choice's text."""
    ignore_eos: bool = False
    """Run past the model's end-of-sequence ids."""
    skip_special_tokens: bool = True
    """Leave control tokens out of the text; their ids are in the items either way."""

    def __init__(self, **values: Any) -> None:
        """Validate `values`, turning pydantic's error into `InvalidParams`."""
        try:
            super().__init__(**values)
        except ValidationError as error:
            raise invalid_params(error, type(self)) from None

    @field_validator("stop", mode="before")
    @classmethod
    def _one_string_is_a_list_of_one(cls, value: object) -> object:
        return (value,) if isinstance(value, str) else value

    @field_validator("stop_token_ids", mode="before")
    @classmethod
    def _sets_are_sequences(cls, value: object) -> object:
        return tuple(sorted(value, key=repr)) if isinstance(value, set | frozenset) else value


def invalid_params(error: ValidationError, model: type[BaseModel]) -> InvalidParams:
    """Turn the first complaint of a pydantic error about `model` into `InvalidParams` with field, value and limit."""
    first = error.errors(include_url=False)[0]
    cause = first.get("ctx", {}).get("error")
    if isinstance(cause, InvalidParams):  # raised by a validator of ours, which knows more
        return cause
    message = str(cause) if cause is not None else first["msg"]
    field = ".".join(str(part) for part in first["loc"])
    value = first["input"]
    context = first.get("ctx", {})
    limits = {name: context[name] for name in _LIMITS if name in context}
    if first["type"] == "finite_number":  # found before the bounds are looked at, so pydantic does not name them
        limits = _bounds(model, field)
        message += "".join(f", {_BOUNDS[name]} {bound}" for name, bound in limits.items())
    shown = repr(value)
    shown = shown if len(shown) <= 80 else shown[:77] + "..."
    return InvalidParams(f"{field}: {message}, got {shown}", field=field, value=value, limit=limits or None)


def _bounds(model: type[BaseModel], field: str) -> dict[str, Any]:
    """The bounds of a number among `model`'s fields, by pydantic's names; none where it has none."""
    info = model.model_fields.get(field)
    if info is None:
        return {}
    rules = list(info.metadata)
    for part in get_args(info.annotation):  # of `Annotated[...] | None`
        for field_info in getattr(part, "__metadata__", ()):
            rules += getattr(field_info, "metadata", ())
    return {name: bound for rule in rules for name in _BOUNDS if (bound := getattr(rule, name, None)) is not None}
