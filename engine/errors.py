"""Re-exports the error tree for users of the engine, which adapters/errors.py defines, and types other errors."""

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
    "as_failure",
    "as_headrace",
]


def as_headrace(error: BaseException | None, what: str) -> HeadraceError:
    """Return `error` if it is typed, else a `HeadraceError` with the message `what` and `error` as its cause."""
    if isinstance(error, HeadraceError):
        return error
    failure = HeadraceError(what)
    failure.__cause__ = error
    return failure


def as_failure(error: Exception) -> RequestFailed:
    """Return the typed error for the requests of a failed step."""
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        failure: RequestFailed = OutOfMemory("the device had no memory for this step")
    else:
        failure = RequestFailed(f"the step failed: {type(error).__name__}")
    failure.__cause__ = error
    return failure
