"""Re-exports the error tree for users of the engine; adapters/errors.py defines it."""

from __future__ import annotations

from headrace.adapters.errors import (
    AdapterRejected,
    AdapterUnavailable,
    DeviceUnavailable,
    EngineCrashed,
    EngineStopped,
    GrammarRejected,
    HeadraceError,
    HookFailed,
    InvalidParams,
    LoadFailed,
    ModelRejected,
    NonFiniteLogits,
    NoTokenLeft,
    OutOfMemory,
    Overloaded,
    PromptTooLong,
    Rejected,
    RequestFailed,
    TokenizerFailed,
    UnknownAdapter,
)

__all__ = [
    "AdapterRejected",
    "AdapterUnavailable",
    "DeviceUnavailable",
    "EngineCrashed",
    "EngineStopped",
    "GrammarRejected",
    "HeadraceError",
    "HookFailed",
    "InvalidParams",
    "LoadFailed",
    "ModelRejected",
    "NoTokenLeft",
    "NonFiniteLogits",
    "OutOfMemory",
    "Overloaded",
    "PromptTooLong",
    "Rejected",
    "RequestFailed",
    "TokenizerFailed",
    "UnknownAdapter",
]
