"""`SamplingParams`: options that shape the tokens of one request, checked when built; never its tenant or adapter."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from inspect import Signature
from typing import Annotated, Literal, Self, TypeAlias, Unpack

from pydantic import Field, StringConstraints, field_validator, model_validator

from headrace.engine.checked import Checked, invalid_params, parameters_of, shown
from headrace.engine.errors import InvalidParams
from headrace.engine.known_names import SAMPLING_NAMES, all_names
from headrace.engine.options import SamplingOptions
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
_MAX_WORDS_LENGTH = 1024  # of all bad words together: they are tokenised on the event loop
_MAX_LOGPROBS = 20
_NOT_WITH_BEAMS = (
    "best_of", "top_k", "top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty", "logit_bias",
    "allowed_token_ids", "forbidden_token_ids", "bad_words", "seed", "min_tokens", "stop", "logprobs",
    "prompt_logprobs", "response_format", "deterministic",
)  # fmt: skip
_NOT_WITH_GRAMMARS = ("allowed_token_ids", "forbidden_token_ids", "bad_words", "min_tokens", "ignore_eos")

StopString: TypeAlias = Annotated[str, StringConstraints(min_length=1, max_length=_MAX_STOP_LENGTH)]
BadWord: TypeAlias = Annotated[str, StringConstraints(min_length=1, max_length=_MAX_WORD_LENGTH)]
TokenId: TypeAlias = Annotated[int, Field(ge=0, lt=2**31, strict=True)]
Bias: TypeAlias = Annotated[float, Field(ge=-100.0, le=100.0)]
LogprobCount: TypeAlias = Annotated[int, Field(ge=0, le=_MAX_LOGPROBS, strict=True)]


class SamplingParams(Checked, frozen=True):
    """Options for choosing tokens and for stopping. Frozen, hashable, serialisable.

    `SamplingOptions` (options.py) describes each option.

    Raises:
        InvalidParams: A value is out of its range; the error names field, value and limit. It is also a `ValueError`.
    """

    known_names = all_names(SAMPLING_NAMES)

    n: Annotated[int, Field(ge=1, le=_MAX_CHOICES, strict=True)] = 1
    best_of: Annotated[int, Field(ge=1, le=_MAX_CHOICES, strict=True)] | None = None
    beam_width: Annotated[int, Field(ge=1, le=_MAX_BEAMS, strict=True)] | None = None
    length_penalty: Annotated[float, Field(ge=-10.0, le=10.0)] = 1.0
    early_stopping: Literal[True, False, "never"] = False
    temperature: Annotated[float, Field(ge=0.0)] = 1.0
    top_k: Annotated[int, Field(ge=0, lt=2**31, strict=True)] = 0
    top_p: Annotated[float, Field(gt=0.0, le=1.0)] = 1.0
    min_p: Annotated[float, Field(ge=0.0, le=1.0)] = 0.0
    presence_penalty: Annotated[float, Field(ge=-2.0, le=2.0)] = 0.0
    frequency_penalty: Annotated[float, Field(ge=-2.0, le=2.0)] = 0.0
    repetition_penalty: Annotated[float, Field(ge=0.01, le=100.0)] = 1.0
    logit_bias: Annotated[tuple[tuple[TokenId, Bias], ...], Field(max_length=_MAX_LISTED)] = ()
    allowed_token_ids: Annotated[tuple[TokenId, ...], Field(min_length=1, max_length=_MAX_IDS)] | None = None
    forbidden_token_ids: Annotated[tuple[TokenId, ...], Field(max_length=_MAX_IDS)] = ()
    bad_words: Annotated[tuple[BadWord, ...], Field(max_length=_MAX_WORDS)] = ()
    response_format: ResponseFormat | None = None
    seed: Annotated[int, Field(ge=-_INT64, lt=_INT64, strict=True)] | None = None
    deterministic: bool = False
    speculate: bool = True
    max_tokens: Annotated[int, Field(ge=1, lt=2**31, strict=True)] | None = None
    min_tokens: Annotated[int, Field(ge=0, lt=2**31, strict=True)] = 0
    stop: Annotated[tuple[StopString, ...], Field(max_length=_MAX_STOPS)] = ()
    stop_token_ids: Annotated[tuple[TokenId, ...], Field(max_length=_MAX_STOPS)] = ()
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = False
    logprobs: LogprobCount | None = None
    prompt_logprobs: LogprobCount | None = None

    def __init__(self, **options: Unpack[SamplingOptions]) -> None:
        """Check `options`; options left out have their default, or the value that the model recommends.

        Raises:
            InvalidParams: An option is unknown or out of its range.
        """
        super().__init__(**options)

    def replace(self, **changes: Unpack[SamplingOptions]) -> Self:
        """Return a copy with `changes`, checked as the constructor checks.

        Raises:
            InvalidParams: An option is unknown or out of its range, or does not go with the others.
        """
        return self._changed(changes)

    @field_validator("top_k", mode="before")
    @classmethod
    def _minus_one_is_all(cls, value: object) -> object:
        return 0 if type(value) is int and value == -1 else value

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


SamplingParams.__signature__ = Signature(parameters_of(SamplingOptions, SamplingParams))


def _is_decimal(key: object) -> bool:
    return isinstance(key, str) and key.isascii() and key.isdecimal()


def _conflict(field: str, value: object, what: str, limit: object) -> InvalidParams:
    return InvalidParams(f"{field}: {what}, got {shown(value)}", field=field, value=value, limit=limit)
