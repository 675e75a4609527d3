"""`ApiError`: a refusal or failure as a client is told of it, and the table from errors to statuses; raises nothing.

Bodies are OpenAI's `{"error": {message, type, param, code}}`, and Anthropic's at the endpoint of its API. Messages
of refusals are the engine's own, which name field, value and limit; those of failures are fixed sentences, so that no
path, address or traceback leaves the process.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

import orjson
from pydantic import ValidationError
from starlette.responses import Response
from starlette.types import Scope

from headrace.engine import (
    AdapterRejected,
    AdapterUnavailable,
    EngineCrashed,
    EngineStopped,
    InvalidParams,
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
    "ERROR_BODY",
    "ApiError",
    "ContextExceeded",
    "as_api_error",
    "error_body",
    "error_event",
    "error_response",
    "messages_error_body",
    "shape_error",
]

ERROR_BODY: Final = "headrace.error_body"
"""Key of the ASGI scope for a path's own function of error bodies; without it, they are OpenAI's."""

_MAX_MESSAGE = 500
_MAX_SHOWN = 40  # characters of a value


class ApiError(Exception):
    """A refusal or failure as the client sees it."""

    def __init__(
        self,
        status: int,
        code: str,
        message: str,
        *,
        param: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        """Hold what the client is told.

        Args:
            status: HTTP status of the answer, where nothing has been sent yet.
            code: Machine-readable reason.
            message: One sentence for a person.
            param: The field of the request that is at fault.
            headers: More headers of the answer, such as Retry-After.
        """
        super().__init__(message)
        self.status = status
        self.code = code
        self.message = message if len(message) <= _MAX_MESSAGE else message[: _MAX_MESSAGE - 3] + "..."
        self.param = param
        self.kind = _KINDS.get(status, "invalid_request_error" if status < 500 else "server_error")
        self.headers = dict(headers or {})

    def renamed(self, names: Mapping[str, str]) -> ApiError:
        """Return the error with the field's name as the client knows it; a place inside the field is left out."""
        name = _NAME.match(self.param or "")
        known = names.get(name[0]) if name is not None else None
        if known is None or self.param is None:
            return self
        message = self.detail
        if message.startswith(self.param):
            message = known + message[len(self.param) :]
        return self.at(known, message)

    @property
    def detail(self) -> str:
        """The part of the message that speaks of the field."""
        return self.message

    def at(self, param: str, detail: str) -> ApiError:
        """Return the same error about the field `param`, with the message `detail`."""
        return ApiError(self.status, self.code, detail, param=param, headers=self.headers)


class ContextExceeded(ApiError):
    """A request that is longer than the context, in the sentence by which clients of OpenAI's API know such a refusal.

    Some of them shorten their messages and try again, so the sentence stays as it is.
    """

    def __init__(
        self, most: int, prompt: int | None, answer: int, *, param: str, detail: str = "", sized: str | None = None
    ) -> None:
        """Hold the sizes, and write the sentence about them.

        Args:
            most: Tokens that a prompt and its answer may have together.
            prompt: Tokens of the prompt; None where they were not counted.
            answer: Tokens of the answer.
            param: The field that is at fault.
            detail: The engine's message, for a prompt that was not counted.
            sized: The field with the prompt, where another one is at fault.
        """
        self.most, self.prompt, self.answer, self._detail = most, prompt, answer, detail
        self._sized = sized
        asked = f"more than that: {detail}"
        if prompt is not None:
            name = sized or param
            where = name if "[" in name else f"the {name}"
            both = f"the length of {where} or completion" if sized else f"the length of {where}"
            counts = f"{prompt} in {where}, {answer} in the completion"
            asked = f"{prompt + answer} tokens ({counts}). Please reduce {both}."
        message = f"This model's maximum context length is {most} tokens. However, you requested {asked}"
        super().__init__(400, "context_length_exceeded", message, param=param)

    @property
    def detail(self) -> str:
        """The engine's message."""
        return self._detail

    def at(self, param: str, detail: str) -> ApiError:
        """Return the same error about the field `param`, with `detail` as the engine's message."""
        return ContextExceeded(self.most, self.prompt, self.answer, param=param, detail=detail, sized=self._sized)

    @property
    def messages_message(self) -> str:
        """The sentence by which clients of Anthropic's API know such a refusal."""
        if self.prompt is None:
            return f"prompt is too long: {self.detail}"
        if self._sized is None:
            return f"prompt is too long: {self.prompt} tokens > {self.most} maximum"
        sizes = f"{self.prompt} + {self.answer} > {self.most}"
        more = "decrease input length or `max_tokens` and try again"
        return f"input length and `max_tokens` exceed context limit: {sizes}, {more}"


_NAME = re.compile(r"\w+")

_KINDS = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}
_NO_RETRY = {"x-should-retry": "false"}


class _Row(NamedTuple):
    """One class of errors and the answer that a client gets for it."""

    error: type[Exception]
    status: int
    code: str
    message: str | None = None
    """Message for the client; None passes on the error's own, which speaks of the request alone."""
    headers: Mapping[str, str] | None = None


_TABLE = (
    _Row(PromptTooLong, 400, "context_length_exceeded"),
    _Row(InvalidParams, 400, "invalid_value"),
    _Row(AdapterRejected, 400, "adapter_invalid"),
    _Row(UnknownAdapter, 404, "model_not_found"),
    _Row(Overloaded, 503, "server_overloaded", None, {"retry-after": "1"}),
    _Row(Rejected, 400, "rejected"),
    _Row(NoTokenLeft, 400, "no_token_left"),
    _Row(NonFiniteLogits, 500, "non_finite_logits", "the model gave numbers that are not finite for this request"),
    _Row(AdapterUnavailable, 503, "adapter_unavailable", "the adapter could not be brought to the device", _NO_RETRY),
    _Row(OutOfMemory, 503, "out_of_memory", "the device had no memory for this request", {"retry-after": "1"}),
    _Row(TokenizerFailed, 500, "tokenizer_failed", "the tokenizer of the model cannot handle this text", _NO_RETRY),
    _Row(RequestFailed, 500, "request_failed", "a step that this request was part of failed"),
    _Row(EngineStopped, 503, "server_shutting_down", "the server is shutting down", {"retry-after": "5"}),
    _Row(EngineCrashed, 503, "engine_dead", "the engine has stopped working", _NO_RETRY),
)


def as_api_error(error: BaseException, names: Mapping[str, str] | None = None) -> ApiError:
    """Return what a client is told about `error`; an unknown one is an internal error without detail.

    Args:
        error: The error that ended the request.
        names: Engine's name of a field -> the client's name, where they differ.
    """
    if isinstance(error, ApiError):
        return error
    for row in _TABLE:
        if isinstance(error, row.error):
            param = getattr(error, "field", None)
            code = "token_out_of_range" if param is not None and param.startswith("prompt[") else row.code
            message = row.message or str(error)
            for name, written in (names or {}).items():
                message = re.sub(rf"\b{name}\b", written, message)
                param = None if param is None else re.sub(rf"^{name}\b", written, param)
            if isinstance(error, PromptTooLong) and error.context is not None:
                return ContextExceeded(error.context, error.tokens, error.room, param=param or "prompt", detail=message)
            return ApiError(row.status, code, message, param=param, headers=row.headers)
    return ApiError(500, "internal_error", "the server failed to handle this request")


def shape_error(error: ValidationError) -> ApiError:
    """Return pydantic's first complaint about a body as an error with the path of the field."""
    first = error.errors(include_url=False)[0]
    context, given = first.get("ctx", {}), first["input"]
    param = ""
    for part in first["loc"]:
        if isinstance(part, int):
            param += f"[{part}]"
        elif not _UNION_ARM.match(part):  # pydantic's own names, which clients do not know
            param += f".{part}" if param else part
    if "part" in context:  # the part at fault of a value that was judged as a whole
        part = context["part"]
        param, given = param + (f"[{part}]" if isinstance(part, int) else f".{part}"), _part_of(given, part)
    kind = first["type"]
    code = "invalid_value"
    if kind == "missing":
        code = "missing_required_parameter"
    elif kind.endswith("_type") or kind in ("int_from_float", "bool_parsing", "model_attributes_type"):
        code = "invalid_type"
    elif kind == "extra_forbidden":
        code = "unknown_parameter"
    told = "" if kind in ("missing", "text_part") else f", got {_clipped(given)}"
    what = _what(kind, context) or first["msg"].replace("Input should be", "must be", 1)
    return ApiError(400, code, f"{param}: {what}{told}", param=param or None)


def _what(kind: str, context: Mapping[str, Any]) -> str | None:
    """Return a message where pydantic's own would name a class of ours or a type of Python's; None elsewhere."""
    if kind == "missing":
        return "is required"
    if kind in _OBJECT_TYPES:
        return "must be an object"
    if kind in ("list_type", "tuple_type"):
        return "must be a list"
    if kind in ("too_short", "too_long"):
        bound, side = ("min_length", "least") if kind == "too_short" else ("max_length", "most")
        return f"must have at {side} {_counted(context[bound], 'item')}" if bound in context else None
    if kind == "string_too_short":
        return "must not be empty"
    if kind == "string_too_long":
        return f"must have at most {_counted(context['max_length'], 'character')}"
    return None


def _counted(count: int, what: str) -> str:
    return f"{count} {what}" if count == 1 else f"{count} {what}s"


def _part_of(value: Any, part: str | int) -> Any:
    return value.get(part) if isinstance(value, Mapping) else value


def _clipped(value: Any) -> str:
    """Return `value` for a message; cut or count what may be large without writing it out first."""
    if isinstance(value, str):
        return repr(value) if len(value) <= _MAX_SHOWN else repr(value[:_MAX_SHOWN]) + "..."
    if value is None or isinstance(value, bool):
        return json.dumps(value)
    if isinstance(value, Sequence | Mapping):
        return f"{'an object' if isinstance(value, Mapping) else 'a list'} of {len(value)}"
    return repr(value)


_OBJECT_TYPES = frozenset({"dict_type", "model_type", "model_attributes_type"})
_UNION_ARM = re.compile(r"(str|int|float|bool)$|(list|dict|tuple|literal)\[|(constrained|function|tagged|model)-")


def error_body(error: ApiError) -> dict[str, Any]:
    """Return OpenAI's error object."""
    return {"error": {"message": error.message, "type": error.kind, "param": error.param, "code": error.code}}


def error_event(error: ApiError) -> bytes:
    """Return the last event of a stream that failed; official clients raise at it."""
    return b"data: " + orjson.dumps(error_body(error)) + b"\n\n"


def messages_error_body(error: ApiError, request_id: str | None = None) -> dict[str, Any]:
    """Return Anthropic's error object, whose `type` follows from the status."""
    kind = _MESSAGES_KINDS.get(error.status, "invalid_request_error" if error.status < 500 else "api_error")
    message = error.messages_message if isinstance(error, ContextExceeded) else error.message
    return {"type": "error", "error": {"type": kind, "message": message}, "request_id": request_id}


_MESSAGES_KINDS = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    429: "rate_limit_error",
    503: "overloaded_error",
}


def error_response(error: ApiError, scope: Scope) -> Response:
    """Return the answer to the request of `scope`, for which nothing has been sent yet."""
    body = orjson.dumps(scope.get(ERROR_BODY, error_body)(error))
    return Response(body, status_code=error.status, headers=error.headers, media_type="application/json")
