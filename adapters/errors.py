"""The error tree of headrace, and nothing else; it lives in the lowest layer that raises, never imports a sibling.

HeadraceError
├── Rejected               refused before the first token; another request may succeed
│   ├── InvalidParams      a field of the request is out of its range (also a ValueError)
│   ├── GrammarRejected    a response format is invalid, too large or takes too long to compile
│   ├── Overloaded         its deadline cannot be met, or its response format waited too long for others
│   ├── PromptTooLong      the prompt leaves no room for one token in the context or in the page pool
│   └── UnknownAdapter     no adapter of that name is loaded
├── LoadFailed             a model or an adapter was not loaded; nothing of it is held
│   ├── ModelRejected      the model's files are missing, damaged, hostile or of an unknown kind
│   ├── AdapterRejected    an adapter's files are missing, damaged, hostile, or made for another model
│   └── DeviceUnavailable  the device that was asked for is not there
├── RequestFailed          this request ended early; the engine serves on
│   ├── AdapterUnavailable its adapter could not be brought to the device: the files are gone, say, or have changed
│   ├── HookFailed         a hook of this request raised, took too long or returned what it may not
│   ├── NoTokenLeft        masks or a response format of this request left no token to choose
│   ├── NonFiniteLogits    the model produced NaN or infinity for this request
│   ├── OutOfMemory        the device had no memory for this request's step
│   └── TokenizerFailed    the model's tokenizer cannot handle the text of this request
├── EngineStopped          the engine is closed or closing, or was never opened
└── EngineCrashed          the step loop died; every stream and every later call gets this
"""

from __future__ import annotations

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


class HeadraceError(Exception):
    """Base of every error that headrace raises on purpose."""


class _Refusal(HeadraceError):
    """A refusal that names the field, the value and the limit it broke."""

    def __init__(self, message: str, *, field: str | None = None, value: object = None, limit: object = None) -> None:
        """Keep what a caller needs to answer its own user.

        Args:
            message: One sentence that names the field, the value and the limit in words.
            field: The offending field, such as `temperature` or `prompt[3]`.
            value: The value that was given.
            limit: The values that are allowed.
        """
        super().__init__(message)
        self.field = field
        self.value = value
        self.limit = limit


class Rejected(_Refusal):
    """Refused before the first token; the caller may change the request and try again."""


class InvalidParams(Rejected, ValueError):
    """A field of the request is out of its range or of the wrong kind."""


class GrammarRejected(Rejected):
    """A response format is invalid, needs what is not supported, is too large or takes too long to compile."""


class PromptTooLong(Rejected):
    """The prompt leaves no room for one token in the model's context or in the page pool."""

    context: int | None = None
    """Tokens that a prompt and its answer may have together; None where the prompt was too long for the tokenizer."""
    tokens: int | None = None
    """Tokens of the prompt; None where it was refused before they were counted."""
    room: int = 0
    """Tokens of an answer that the prompt must leave room for."""


class Overloaded(Rejected):
    """The engine has too much to do: the request's deadline cannot be met, or its response format waited too long for
    others to be compiled. Later, or elsewhere, the same request may succeed."""


class UnknownAdapter(Rejected):
    """No adapter of that name is loaded."""


class LoadFailed(_Refusal):
    """A model or an adapter was not loaded; nothing of it is held."""


class ModelRejected(LoadFailed):
    """The model's files are missing, damaged, hostile or of a kind that headrace does not know."""


class AdapterRejected(LoadFailed):
    """An adapter's files are missing, damaged, hostile or made for another model, or it does not fit the engine."""


class DeviceUnavailable(LoadFailed):
    """The device that was asked for is not there or cannot be used."""


class RequestFailed(HeadraceError):
    """This request ended early; the engine serves on."""


class AdapterUnavailable(RequestFailed):
    """The adapter of this request could not be brought to the device; `__cause__` says why. Load the adapter again."""


class HookFailed(RequestFailed):
    """A hook of this request raised (`__cause__` holds the exception), took too long or returned what it may not."""


class NoTokenLeft(RequestFailed):
    """The request left none of the model's tokens to choose; `field` names the cause."""

    def __init__(self, message: str, *, field: str | None = None) -> None:
        """Keep the field that is at fault, such as `response_format`; None if it is not known."""
        super().__init__(message)
        self.field = field


class NonFiniteLogits(RequestFailed):
    """The model produced NaN or infinity where this request's next token was to be chosen."""


class OutOfMemory(RequestFailed):
    """The device had no memory for the step this request was part of."""


class TokenizerFailed(RequestFailed):
    """The model's tokenizer failed on the text of this request; `__cause__` holds what it raised."""


class EngineStopped(HeadraceError):
    """The engine is closed or closing, or was never opened."""


class EngineCrashed(HeadraceError):
    """The step loop died; `__cause__` holds why. Every stream and every later call gets this."""
