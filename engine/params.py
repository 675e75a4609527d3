"""`SamplingParams`: what shapes the tokens of one request, checked when it is built; never who asks or how."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Annotated, Any, Literal, Self, TypeAlias, get_args

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    StringConstraints,
    ValidationError,
    field_validator,
    model_validator,
)

from headrace.engine.errors import InvalidParams
from headrace.engine.response_format import ResponseFormat

__all__ = ["SamplingParams", "invalid_params", "shown"]

_INT64 = 2**63
_MAX_CHOICES = 128
_MAX_BEAMS = 16
_MAX_STOPS = 16
_MAX_STOP_LENGTH = 1024
_MAX_LISTED = 1024
_MAX_IDS = 2**15
_MAX_WORDS = 64
_MAX_WORD_LENGTH = 128
_MAX_WORDS_LENGTH = 1024  # of all together: they are tokenised on the event loop
_MAX_LOGPROBS = 20
_NOT_WITH_BEAMS = (
    "best_of", "top_k", "top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty", "logit_bias",
    "allowed_token_ids", "forbidden_token_ids", "bad_words", "seed", "min_tokens", "stop", "logprobs",
    "prompt_logprobs", "response_format", "deterministic",
)  # fmt: skip
_NOT_WITH_GRAMMARS = ("allowed_token_ids", "forbidden_token_ids", "bad_words", "min_tokens", "ignore_eos")
_BOUNDS = {"gt": "above", "ge": "at least", "lt": "below", "le": "at most"}
_LIMITS = (*_BOUNDS, "max_length", "min_length", "expected")

StopString: TypeAlias = Annotated[str, StringConstraints(min_length=1, max_length=_MAX_STOP_LENGTH)]
BadWord: TypeAlias = Annotated[str, StringConstraints(min_length=1, max_length=_MAX_WORD_LENGTH)]
TokenId: TypeAlias = Annotated[int, Field(ge=0, lt=2**31, strict=True)]
Bias: TypeAlias = Annotated[float, Field(ge=-100.0, le=100.0)]
LogprobCount: TypeAlias = Annotated[int, Field(ge=0, le=_MAX_LOGPROBS, strict=True)]


class SamplingParams(BaseModel):
    """How to choose tokens and when to stop. Frozen, hashable, serialisable.

    Raises:
        InvalidParams: A value is out of its range; names field, value and limit. It is also a `ValueError`.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    n: Annotated[int, Field(ge=1, le=_MAX_CHOICES, strict=True)] = 1
    """Independent choices for the prompt; its pages are computed once and shared."""
    best_of: Annotated[int, Field(ge=1, le=_MAX_CHOICES, strict=True)] | None = None
    """Generate so many choices and return the `n` of the highest mean log-probability; None is `n`. Not streamed."""
    beam_width: Annotated[int, Field(ge=1, le=_MAX_BEAMS, strict=True)] | None = None
    """Search for the likeliest sequences with so many beams instead of sampling; they come when the search is over."""
    length_penalty: Annotated[float, Field(ge=-10.0, le=10.0)] = 1.0
    """A sequence's score is the sum of its log-probabilities divided by its length to this power."""
    early_stopping: Literal[True, False, "never"] = False
    """End a search at the first `beam_width` ended sequences; False when the best beam is unlikely to end better than
    the worst of them; "never" when no beam can."""
    temperature: Annotated[float, Field(ge=0.0)] = 1.0
    """0 is greedy. Sampling divides the logits by it."""
    top_k: Annotated[int, Field(ge=0, lt=2**31, strict=True)] = 0
    """Sample among this many most likely tokens; 0 is all of them."""
    top_p: Annotated[float, Field(gt=0.0, le=1.0)] = 1.0
    """Sample among the fewest most likely tokens whose probabilities reach this sum (after `top_k`)."""
    min_p: Annotated[float, Field(ge=0.0, le=1.0)] = 0.0
    """Drop tokens less likely than this fraction of the most likely one."""
    presence_penalty: Annotated[float, Field(ge=-2.0, le=2.0)] = 0.0
    """Subtracted from the logit of each token that the completion holds."""
    frequency_penalty: Annotated[float, Field(ge=-2.0, le=2.0)] = 0.0
    """Subtracted from a token's logit once for each time that the completion holds it."""
    repetition_penalty: Annotated[float, Field(ge=0.01, le=100.0)] = 1.0
    """Divides the positive logits, and multiplies the negative ones, of tokens in the prompt or the completion."""
    logit_bias: Annotated[tuple[tuple[TokenId, Bias], ...], Field(max_length=_MAX_LISTED)] = ()
    """Added to the logits of these token ids. A mapping is accepted; its keys may be digits, as in JSON."""
    allowed_token_ids: Annotated[tuple[TokenId, ...], Field(min_length=1, max_length=_MAX_IDS)] | None = None
    """The only tokens that may be chosen; one that ends the choice must be among them to do so. None is all."""
    forbidden_token_ids: Annotated[tuple[TokenId, ...], Field(max_length=_MAX_IDS)] = ()
    """Tokens that are never chosen."""
    bad_words: Annotated[tuple[BadWord, ...], Field(max_length=_MAX_WORDS)] = ()
    """Strings whose tokens, with a space before them or without, are never completed in this order; together of at most
    1024 characters."""
    response_format: ResponseFormat | None = None
    """What the text must be: JSON, by a schema or not, or of a grammar. It is that where the choice ends by itself."""
    seed: Annotated[int, Field(ge=-_INT64, lt=_INT64, strict=True)] | None = None
    """Of the noise, which then is the same whatever else runs. None draws one from the engine's seed."""
    deterministic: bool = False
    """Same seed, same tokens and log-probabilities to the last bit, whatever else runs, is cached or was preempted; it
    computes in steps of its own, which is slower for it and for whoever waits meanwhile."""
    max_tokens: Annotated[int, Field(ge=1, lt=2**31, strict=True)] | None = None
    """None runs to the limit of the context or of the page pool and ends with `length`."""
    min_tokens: Annotated[int, Field(ge=0, lt=2**31, strict=True)] = 0
    """Until the choice has so many tokens nothing that would stop it is chosen, and no stop string is looked for."""
    stop: Annotated[tuple[StopString, ...], Field(max_length=_MAX_STOPS)] = ()
    """Strings that end the choice; the text is cut just before the first of them. A single string is accepted."""
    stop_token_ids: Annotated[tuple[TokenId, ...], Field(max_length=_MAX_STOPS)] = ()
    """Token ids that end the choice, besides the model's own end-of-sequence ids."""
    include_stop_str_in_output: bool = False
    """Keep the stop string, or the text of the stop token, at the end of the choice's text."""
    ignore_eos: bool = False
    """Run past the model's end-of-sequence ids."""
    skip_special_tokens: bool = True
    """Leave control tokens out of the text; their ids are in the items either way."""
    spaces_between_special_tokens: bool = False
    """Set special tokens that are shown off from their neighbours by a space."""
    logprobs: LogprobCount | None = None
    """Log-probabilities of each token and of so many likeliest ones, before any option here changed them."""
    prompt_logprobs: LogprobCount | None = None
    """The same for each token of the prompt but the first."""

    def __init__(self, **values: Any) -> None:
        """Validate `values`, turning pydantic's error into `InvalidParams`."""
        try:
            super().__init__(**values)
        except ValidationError as error:
            raise invalid_params(error, type(self)) from None

    @field_validator("stop", "bad_words", mode="before")
    @classmethod
    def _one_string_is_a_list_of_one(cls, value: object) -> object:
        return (value,) if isinstance(value, str) else value

    @field_validator("stop_token_ids", "allowed_token_ids", "forbidden_token_ids", mode="before")
    @classmethod
    def _sets_are_sequences(cls, value: object) -> object:
        return tuple(sorted(value, key=repr)) if isinstance(value, set | frozenset) else value

    @field_validator("logit_bias", mode="before")
    @classmethod
    def _mappings_are_pairs(cls, value: object) -> object:
        if not isinstance(value, Mapping):
            return value
        return tuple((int(key) if _is_decimal(key) else key, bias) for key, bias in value.items())

    @field_validator("response_format", mode="before")
    @classmethod
    def _text_is_no_format(cls, value: object) -> object:
        return None if value == {"type": "text"} else value

    @model_validator(mode="after")
    def _fields_fit_together(self) -> Self:
        if self.best_of is not None and self.best_of < self.n:
            raise _conflict("best_of", self.best_of, f"must be at least n ({self.n})", {"ge": self.n})
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            what = f"must be at most max_tokens ({self.max_tokens})"
            raise _conflict("min_tokens", self.min_tokens, what, {"le": self.max_tokens})
        if len({token for token, _ in self.logit_bias}) < len(self.logit_bias):
            raise _conflict("logit_bias", self.logit_bias, "names a token twice", None)
        if self.allowed_token_ids is not None and not set(self.allowed_token_ids).difference(self.forbidden_token_ids):
            what = "forbidden_token_ids leave none of them"
            raise _conflict("allowed_token_ids", self.allowed_token_ids, what, None)
        if sum(map(len, self.bad_words)) > _MAX_WORDS_LENGTH:
            what = f"must have at most {_MAX_WORDS_LENGTH} characters together"
            raise _conflict("bad_words", self.bad_words, what, _MAX_WORDS_LENGTH)
        self._check_beams()
        if self.response_format is not None:
            self._refuse(_NOT_WITH_GRAMMARS, "response_format")
        return self

    def _refuse(self, fields: Iterable[str], other: str) -> None:
        for field in fields:
            if getattr(self, field) != type(self).model_fields[field].default:
                raise _conflict(field, getattr(self, field), f"cannot go with {other}", None)

    def _check_beams(self) -> None:
        if self.beam_width is None:
            for field in ("length_penalty", "early_stopping"):
                if getattr(self, field) != type(self).model_fields[field].default:
                    raise _conflict(field, getattr(self, field), "is for a search with beam_width", None)
            return
        if self.n > self.beam_width:
            raise _conflict("n", self.n, f"must be at most beam_width ({self.beam_width})", {"le": self.beam_width})
        if self.temperature not in (0.0, type(self).model_fields["temperature"].default):
            raise _conflict("temperature", self.temperature, "cannot go with beam_width", None)
        self._refuse(_NOT_WITH_BEAMS, "beam_width")


def _is_decimal(key: object) -> bool:
    return isinstance(key, str) and key.isascii() and key.isdecimal()


def _conflict(field: str, value: object, what: str, limit: object) -> InvalidParams:
    return InvalidParams(f"{field}: {what}, got {shown(value)}", field=field, value=value, limit=limit)


def shown(value: object) -> str:
    """`value` as a message shows it: its start where it is long."""
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


def invalid_params(error: ValidationError, model: type[BaseModel]) -> InvalidParams:
    """Turn the first complaint of a pydantic error about `model` into `InvalidParams` with field, value and limit."""
    first = error.errors(include_url=False)[0]
    cause = first.get("ctx", {}).get("error")
    if isinstance(cause, InvalidParams):  # raised by a validator of ours, which knows more
        return cause
    message = str(cause) if cause is not None else first["msg"]
    field = ".".join(str(part) for part in first["loc"])
    if first["type"] == "extra_forbidden":
        from difflib import get_close_matches  # which nothing else needs

        alike = get_close_matches(field, model.model_fields, 1)
        message = "there is no such option" + "".join(f" (but {name})" for name in alike)
    value = first["input"]
    context = first.get("ctx", {})
    limits = {name: context[name] for name in _LIMITS if name in context}
    if first["type"] == "finite_number":  # found before the bounds are looked at, so pydantic does not name them
        limits = _bounds(model, field)
        message += "".join(f", {_BOUNDS[name]} {bound}" for name, bound in limits.items())
    return InvalidParams(f"{field}: {message}, got {shown(value)}", field=field, value=value, limit=limits or None)


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
