"""`EngineConfig`: what a user may choose when opening an engine, checked and frozen; never what a device measured."""

from __future__ import annotations

import os
import re
from decimal import Decimal
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainValidator,
    ValidationError,
    model_validator,
)

from headrace.engine.errors import InvalidParams
from headrace.engine.params import invalid_params
from headrace.engine.scheduling.policies import policy_of
from headrace.engine.scheduling.policy import Policy

__all__ = ["EngineConfig", "parse_bytes"]

_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}
_DEVICE = re.compile(r"auto|cpu|cuda(:\d{1,3})?")
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


def _as_text(value: object) -> object:
    return os.fspath(value) if isinstance(value, os.PathLike) else value


def _known_device(value: str) -> str:
    if _DEVICE.fullmatch(value) is None:
        raise ValueError("must be auto, cpu, cuda or cuda:N")
    return value


def _known_policy(value: str | dict[str, Any] | Policy) -> str | dict[str, Any] | Policy:
    policy_of(value)
    return value


class EngineConfig(BaseModel):
    """Options of `Engine`. Frozen and complete before use; what is None is chosen for the device when it opens.

    Raises:
        InvalidParams: A value is out of its range; names field, value and limit.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    model: Annotated[str, Field(min_length=1), BeforeValidator(_as_text)]
    """A folder in Hugging Face layout, a `.gguf` file, or a hub id (with `allow_download`)."""
    device: Annotated[str, AfterValidator(_known_device)] = "auto"
    """`auto`, `cpu`, `cuda` or `cuda:N`; `auto` takes a GPU if there is one, and the CPU otherwise."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Arithmetic of the model. `float32` uses no reduced precision anywhere; `auto` is the fastest for the device."""
    load_format: Literal["auto", "random"] = "auto"
    """`random` needs only a config.json (a folder, or the file itself) and invents weights: for benchmarks."""
    allow_download: bool = False
    """Let a hub id that is not on this machine be fetched from the hub."""
    kv_memory: Annotated[int, BeforeValidator(parse_bytes), Field(gt=0, lt=2**63)] | None = None
    """Bytes of keys and values, or text such as "2GiB"; None takes a share of what is free."""
    kv_dtype: Literal["auto", "fp8"] = "auto"
    """Dtype of keys and values: `auto` is `dtype`; `fp8` (e4m3, on GPUs) halves their memory and traffic."""
    swap_memory: Annotated[int, BeforeValidator(parse_bytes), Field(ge=0, lt=2**63)] = 0
    """Bytes of host memory, or text, for pages that the device has no room for; 0 computes them again."""
    page_size: Annotated[int, Field(ge=1, le=1024)] = 16
    """Tokens in a page."""
    max_batched_tokens: Annotated[int, Field(ge=1)] | None = None
    """Tokens in one step, prefill and decode together."""
    max_rows: Annotated[int, Field(ge=1, le=65536)] | None = None
    """Requests in one step."""
    max_context: Annotated[int, Field(ge=2)] | None = None
    """Tokens of prompt and completion together; None is what the model was made for."""
    max_unread_tokens: Annotated[int, Field(ge=1)] = 512
    """Tokens a reader may leave unread before its request pauses."""
    prefix_cache: bool = True
    """Keep the pages of past prompts and completions for requests that start the same way."""
    policy: Annotated[str | dict[str, Any] | Policy, PlainValidator(_known_policy)] = "first_come"
    """Who is served first: a name, `{"name": "fair_share", "weights": {"a": 2.0}}`, or a `Policy` of the application's
    own, for one engine. docs/scheduling.md says which does what."""
    itl_target_ms: Annotated[float, Field(gt=0.0)] | None = None
    """Milliseconds between tokens to aim at: prompts get what that leaves of a step; None gives them all of it."""
    launch_ahead: Annotated[int, Field(ge=1, le=8)] | None = None
    """Steps that may be launched and not yet committed; a cancelled request returns its pages within as many. None is
    2, and on a GPU up to 8 that take 5 ms together, as long as every request that runs goes on and nobody waits."""
    decode_attention: Literal["auto", "fused", "even", "fa2", "xqa"] = "auto"
    """Kernel of decode attention on a GPU; `auto` chooses by batch and context, as measured."""
    kernel_cache: Annotated[str, BeforeValidator(_as_text)] | None = None
    """Folder that keeps compiled GPU kernels; None is one in the user's cache. docs/kernels.md says more."""
    cpu_threads: Annotated[int, Field(ge=1, le=1024)] | None = None
    """Threads of a CPU step; None takes one less than torch would, so that a core is left to the event loop."""
    adapter_slots: Annotated[int, Field(ge=0, le=1024)] = 0
    """Adapters on the device at a time; 0 takes none. docs/adapters.md says more of this and the next six."""
    adapter_memory: Annotated[int, BeforeValidator(parse_bytes), Field(gt=0, lt=2**63)] | None = None
    """Bytes of the device for them; None is room for as many of rank 16 on every module as there are slots, and for
    one of `max_adapter_rank`."""
    adapter_host_memory: Annotated[int, BeforeValidator(parse_bytes), Field(gt=0, lt=2**63)] = 2 << 30
    """Bytes of host memory for adapters that are loaded; those used least recently are read from disk again.

    For a GPU they are taken when the engine opens.
    """
    max_adapters: Annotated[int, Field(ge=1, le=65536)] = 1024
    """Adapters that may be loaded."""
    max_adapter_rank: Annotated[int, Field(ge=1, le=256)] = 64
    """Largest rank of a module's update."""
    max_step_adapters: Annotated[int, Field(ge=1, le=1024)] | None = None
    """Different adapters in one step; None is as many as there are slots."""
    max_step_adapter_memory: Annotated[int, BeforeValidator(parse_bytes), Field(gt=0, lt=2**63)] | None = None
    """Bytes of different adapters in one step, which each step reads; one adapter alone may be larger."""
    hook_seconds: Annotated[float, Field(gt=0.0, le=60.0)] = 1.0
    """Seconds that one call of a hook may take before its stream fails."""
    hang_seconds: Annotated[float, Field(gt=0.0)] | None = 300.0
    """Seconds for which a step, or a change of memory, may be waited for (`sleep` and `wake` for ten times as long);
    what takes longer ends the engine with `EngineCrashed`."""
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] = 0
    """Seeds the requests that name none: the same requests in the same order give the same tokens."""

    def __init__(self, **values: Any) -> None:
        """Validate `values`, turning pydantic's error into `InvalidParams`."""
        try:
            super().__init__(**values)
        except ValidationError as error:
            raise invalid_params(error, type(self)) from None

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
