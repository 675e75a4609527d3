"""Re-exports the error tree for users of the engine; never defines an error (adapters/errors.py draws the tree)."""

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
