"""`EngineConfig`: options that a user may choose when opening an engine, checked and frozen; never measured values."""

from __future__ import annotations

import inspect
import os
import re
from collections.abc import Callable
from decimal import Decimal
from typing import Annotated, Any, Literal, Unpack

from pydantic import AfterValidator, BeforeValidator, Field, PlainValidator, model_validator

from headrace.engine.checked import Checked, parameters_of
from headrace.engine.errors import InvalidParams
from headrace.engine.known_names import ENGINE_NAMES, SYNONYMS, all_names, with_own_names
from headrace.engine.options import ConfigOptions, EngineOptions
from headrace.engine.scheduling.policies import policy_of
from headrace.engine.scheduling.policy import Policy
from headrace.engine.speculation import Speculation, speculation_of

__all__ = ["EngineConfig", "parse_bytes", "spell_out_options"]

_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}
_DEVICE = re.compile(r"auto|cpu|cuda(:\d{1,3})?")
_FEWEST_WITH_DRAFTS = 3  # tokens of a step: a row's own, and of what it leaves half for drafts, half for prompts
_BYTES = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([a-zA-Z]*)\s*")


def parse_bytes(value: object) -> object:
    """Turn "2GiB", "512 MB" or "1.5gib" into bytes; anything that is not a str passes through.

    Raises:
        ValueError: The text is not a size.
    """
    if not isinstance(value, str):
        return value
    match = _BYTES.fullmatch(value)
    if match is None or match[2].upper() not in _UNITS:
        raise ValueError("must be bytes, or a number with KiB, MiB, GiB, KB, MB or GB")
    return int(Decimal(match[1]) * _UNITS[match[2].upper()])


def _as_path(value: object) -> object:
    """Return a path as text, with the home folder in place of `~`; any other value passes through."""
    return os.path.expanduser(os.fspath(value)) if isinstance(value, str | os.PathLike) else value


def _known_device(value: str) -> str:
    if _DEVICE.fullmatch(value) is None:
        raise ValueError("must be auto, cpu, cuda or cuda:N")
    return value


def _known_policy(value: str | dict[str, Any] | Policy) -> str | dict[str, Any] | Policy:
    policy_of(value)
    return value


class EngineConfig(Checked, frozen=True):
    """Options of `Engine`. Frozen and complete before use; options that are None are chosen when the device opens.

    `ConfigOptions` (options.py) describes each option.

    Raises:
        InvalidParams: A value is out of its range; the error names field, value and limit.
    """

    known_names = {**SYNONYMS, **all_names(ENGINE_NAMES)}

    model: Annotated[str, Field(min_length=1), BeforeValidator(_as_path)]
    file: Annotated[str, Field(min_length=1)] | None = None
    device: Annotated[str, AfterValidator(_known_device)] = "auto"
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    load_format: Literal["auto", "random"] = "auto"
    model_impl: Literal["auto", "native", "transformers"] = "auto"
    quantize: Literal["fp8", "int8", "int4"] | None = None
    quantize_head: bool = False
    allow_download: bool = False
    generation_defaults: Literal["model", "none"] = "model"
    kv_memory: Annotated[int, BeforeValidator(parse_bytes), Field(gt=0, lt=2**63)] | None = None
    kv_dtype: Literal["auto", "fp8"] = "auto"
    swap_memory: Annotated[int, BeforeValidator(parse_bytes), Field(ge=0, lt=2**63)] = 0
    page_size: Annotated[int, Field(ge=1, le=1024)] = 16
    max_batched_tokens: Annotated[int, Field(ge=1)] | None = None
    max_rows: Annotated[int, Field(ge=1, le=65536)] | None = None
    max_context: Annotated[int, Field(ge=2)] | None = None
    max_unread_tokens: Annotated[int, Field(ge=1)] = 512
    prefix_cache: bool = True
    speculation: Annotated[Speculation | None, PlainValidator(speculation_of)] = None
    policy: Annotated[str | dict[str, Any] | Policy, PlainValidator(_known_policy)] = "first_come"
    itl_target_ms: Annotated[float, Field(gt=0.0)] | None = None
    launch_ahead: Annotated[int, Field(ge=1, le=8)] | None = None
    decode_attention: Literal["auto", "fused", "even", "fa2", "xqa", "split"] = "auto"
    kernel_cache: Annotated[str, BeforeValidator(_as_path)] | None = None
    cpu_threads: Annotated[int, Field(ge=1, le=1024)] | None = None
    adapter_slots: Annotated[int, Field(ge=0, le=1024)] = 0
    adapter_memory: Annotated[int, BeforeValidator(parse_bytes), Field(gt=0, lt=2**63)] | None = None
    adapter_host_memory: Annotated[int, BeforeValidator(parse_bytes), Field(gt=0, lt=2**63)] = 2 << 30
    max_adapters: Annotated[int, Field(ge=1, le=65536)] = 1024
    max_adapter_rank: Annotated[int, Field(ge=1, le=256)] = 64
    max_step_adapters: Annotated[int, Field(ge=1, le=1024)] | None = None
    max_step_adapter_memory: Annotated[int, BeforeValidator(parse_bytes), Field(gt=0, lt=2**63)] | None = None
    hook_seconds: Annotated[float, Field(gt=0.0, le=60.0)] = 1.0
    hang_seconds: Annotated[float, Field(gt=0.0)] | None = 300.0
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] = 0

    def __init__(self, **options: Unpack[ConfigOptions]) -> None:
        """Check `options`; vLLM's names of options (`SYNONYMS` in known_names.py) are accepted, too.

        Raises:
            InvalidParams: An option is unknown or out of its range.
        """
        super().__init__(**with_own_names(options))

    @model_validator(mode="after")
    def _every_decode_fits(self) -> EngineConfig:
        if self.max_rows and self.max_batched_tokens and self.max_batched_tokens < self.max_rows:
            raise InvalidParams(
                f"max_batched_tokens: must be at least max_rows ({self.max_rows}), got {self.max_batched_tokens}",
                field="max_batched_tokens",
                value=self.max_batched_tokens,
                limit={"ge": self.max_rows},
            )
        return self

    @model_validator(mode="after")
    def _a_draft_fits(self) -> EngineConfig:
        if self.speculation and self.max_batched_tokens and self.max_batched_tokens < _FEWEST_WITH_DRAFTS:
            raise InvalidParams(
                f"max_batched_tokens: must be at least {_FEWEST_WITH_DRAFTS} with the option speculation, or no step "
                f"has room for a draft, got {self.max_batched_tokens}",
                field="max_batched_tokens",
                value=self.max_batched_tokens,
                limit={"ge": _FEWEST_WITH_DRAFTS},
            )
        return self

    @model_validator(mode="after")
    def _head_follows_layers(self) -> EngineConfig:
        if self.quantize_head and self.quantize is None:
            raise InvalidParams(
                'quantize_head: needs quantize="fp8", "int8" or "int4", and quantize is None; a quantised checkpoint '
                "says itself how its head is stored",
                field="quantize_head",
                value=True,
                limit=False,
            )
        return self


EngineConfig.__signature__ = inspect.Signature(parameters_of(ConfigOptions, EngineConfig))


def spell_out_options(init: Callable[..., None]) -> None:
    """Make the signature of a constructor that takes `EngineOptions` name each option with its default.

    Type checkers read the options from the annotation; notebooks, `help` and `inspect.signature` read the signature.
    """
    given = inspect.signature(init)
    own = [each for each in given.parameters.values() if each.kind is not inspect.Parameter.VAR_KEYWORD]
    options = [each for each in parameters_of(EngineOptions, EngineConfig) if each.name != "model"]
    setattr(init, "__signature__", given.replace(parameters=[*own, *options]))  # noqa: B010 - unknown to mypy
