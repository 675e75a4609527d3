"""Judges answers by the types that OpenAI and Anthropic generate from their schemas; holds no tests.

The types of the Python packages refuse wrong values, unknown kinds and missing keys that may not be null. What they do
not say is which keys must be there though they may be null, and that nothing else may: `NULLABLE` and `EXTENSIONS` do.
"""

from __future__ import annotations

import json
from collections import defaultdict, deque
from collections.abc import Mapping
from functools import cache
from typing import Any, Final

import anthropic.types as claude
import openai
from anthropic.types.shared import ErrorResponse
from openai.types import Completion, CreateEmbeddingResponse, ErrorObject, Model, responses
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from pydantic import BaseModel, TypeAdapter
from starlette.applications import Starlette
from starlette.types import Message, Receive, Scope, Send

__all__ = ["Judged", "judge", "judge_body", "judge_stream"]

NULLABLE: Final[Mapping[str, str]] = {
    "openai.ChatCompletion": "system_fingerprint usage",
    "openai.ChatCompletionMessage": "content refusal",
    "openai.Choice": "logprobs",
    "openai.ChoiceLogprobs": "content refusal",
    "openai.ChatCompletionTokenLogprob": "bytes",
    "openai.TopLogprob": "bytes",
    "openai.CompletionChoice": "logprobs",
    "openai.Response": "error incomplete_details instructions metadata temperature top_p background completed_at "
    "max_output_tokens max_tool_calls previous_response_id prompt_cache_key reasoning safety_identifier service_tier "
    "status text top_logprobs truncation usage user frequency_penalty presence_penalty store",
    "openai.ResponseErrorEvent": "code param",
    "openai.FunctionTool": "parameters strict",
    "openai.ErrorObject": "code param",
    "anthropic.Message": "container diagnostics stop_details stop_reason stop_sequence",
    "anthropic.Usage": "cache_creation cache_creation_input_tokens cache_read_input_tokens inference_geo "
    "output_tokens_details server_tool_use service_tier speed",
    "anthropic.MessageDeltaUsage": "cache_creation_input_tokens cache_read_input_tokens input_tokens "
    "output_tokens_details server_tool_use",
    "anthropic.Delta": "container stop_details stop_reason stop_sequence",
    "anthropic.TextBlock": "citations",
    "anthropic.ToolUseBlock": "caller",
    "anthropic.ErrorResponse": "request_id",
}
"""Keys that must be there and may be null, by class: OpenAI's and Anthropic's schemas list them as required, and for a
response the specification of Open Responses does."""

EXTENSIONS: Final[Mapping[str, str]] = {
    "openai.ChatCompletionMessage": "reasoning_content",
    "openai.ChoiceDelta": "reasoning_content",
    "openai.Model": "max_model_len parent",
    "openai.Response": "frequency_penalty presence_penalty store",  # OpenAI's service sends them, its types lack them
    "openai.ResponseFunctionCallArgumentsDoneEvent": "name",
}
"""Keys that the types do not have, by class."""

_WHOLE: Final[Mapping[str, Any]] = {
    "/v1/chat/completions": ChatCompletion,
    "/v1/completions": Completion,
    "/v1/embeddings": CreateEmbeddingResponse,
    "/v1/responses": responses.Response,
    "/v1/messages": claude.Message,
    "/v1/messages/count_tokens": claude.MessageTokensCount,
}
_EVENTS: Final[Mapping[str, Any]] = {
    "/v1/chat/completions": ChatCompletionChunk,
    "/v1/completions": Completion,
    "/v1/responses": responses.ResponseStreamEvent,
    "/v1/messages": claude.RawMessageStreamEvent,
}
_MORE: Final = ("/v1/models", "/v1/responses/")
_LATEST = not openai.__version__.startswith("2.")  # whose types lack what came later
_MOST = 2**20  # bytes of an answer that is kept
_KEPT = 20  # answers of one endpoint and status
_ENDS = 12  # events at either end of a long stream that are judged


def judge(kind: Any, value: Any) -> None:
    """Assert that a value is what an official type says.

    Args:
        kind: A class or union of the packages.
        value: What JSON holds.

    Raises:
        ValidationError: A value is wrong, of no known kind, or lacks a key that may not be null.
        AssertionError: A required key is missing that may be null, or there is one that the type does not have.
    """
    _walk(_adapter(kind).validate_json(json.dumps(value), strict=True), value)


def judge_body(path: str, status: int, body: Any) -> None:
    """Assert that a whole answer, or an error, is what the official schema of its endpoint says."""
    if status >= 400:
        return judge(ErrorResponse, body) if path.startswith("/v1/messages") else judge(ErrorObject, body["error"])
    if path == "/v1/models":
        assert body.keys() == {"object", "data"} and body["object"] == "list"
        for each in body["data"]:
            judge(Model, each)
        return None
    if path.startswith("/v1/models/"):
        return judge(Model, body)
    if path.endswith("/input_items"):
        return judge(responses.ResponseItemList, body)
    if path.startswith("/v1/responses/"):
        return None if body.get("deleted") else judge(responses.Response, body)
    if path == "/v1/completions":
        body = _as_typed(body)
    if path == "/v1/embeddings":  # the types know no base64, which the client asks for and decodes
        numbers = [each | {"embedding": []} if isinstance(each["embedding"], str) else each for each in body["data"]]
        body = body | {"data": numbers}
    return judge(_WHOLE[path], body)


def judge_stream(path: str, text: str) -> None:
    """Assert that every event is what the official schema of its endpoint says; of a long stream, both its ends."""
    blocks = [block for block in text.split("\n\n") if block and not block.startswith(":")]
    judged = blocks if len(blocks) <= 2 * _ENDS else [*blocks[:_ENDS], *blocks[-_ENDS:]]
    for block in judged:
        data = block.partition("data: ")[2]
        if data == "[DONE]":
            continue
        event = json.loads(data)
        kind: Any = _EVENTS[path]
        if "error" in event and path != "/v1/responses":
            judge_body(path, 500, event)
        elif event.get("type") != "ping":  # which Anthropic's types leave out
            judge(kind, _as_typed(event) if kind is Completion else event)


def _as_typed(body: dict[str, Any]) -> dict[str, Any]:
    """A completion without the nulls that OpenAI's service sends and the types do not know."""

    def choice(given: dict[str, Any]) -> dict[str, Any]:
        logprobs = given["logprobs"] and {
            key: value and [{} if each is None and key == "top_logprobs" else each or 0.0 for each in value]
            if key in ("token_logprobs", "top_logprobs")
            else value
            for key, value in given["logprobs"].items()
        }
        return given | {"finish_reason": given["finish_reason"] or "stop", "logprobs": logprobs}

    return body | {"choices": [choice(each) for each in body["choices"]]}


@cache
def _adapter(kind: Any) -> TypeAdapter[Any]:
    return TypeAdapter(kind)


def _walk(parsed: Any, raw: Any) -> None:
    """Compare keys with those that the classes have, all the way down."""
    if isinstance(parsed, BaseModel):
        cls = type(parsed)
        name = f"{cls.__module__.partition('.')[0]}.{cls.__name__}"
        fields = {field.alias or key: key for key, field in cls.model_fields.items()}
        missing = {*NULLABLE.get(name, "").split()} - raw.keys()
        assert not missing, f"{name} lacks {missing}"
        foreign = raw.keys() - fields.keys() - {*EXTENSIONS.get(name, "").split()}
        assert not foreign, f"{name} has {foreign}"
        for key, field in fields.items():
            if key in raw:
                _walk(getattr(parsed, field), raw[key])
    elif isinstance(parsed, list | tuple):
        for one, other in zip(parsed, raw, strict=True):
            _walk(one, other)


class Judged:
    """An application whose last answers are kept, so that they can be judged when its server has stopped."""

    def __init__(self, app: Starlette) -> None:
        """Pass everything on to `app`."""
        self._app = app
        self.state, self.routes = app.state, app.routes
        self._kept: dict[tuple[str, int], deque[bytes]] = defaultdict(lambda: deque(maxlen=_KEPT))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve a request, and keep the answer if an official schema is about it."""
        path = scope.get("path", "")
        known = path in _WHOLE or path.startswith(_MORE)
        if scope["type"] != "http" or scope["method"] == "OPTIONS" or not known or not _LATEST:
            await self._app(scope, receive, send)
            return
        parts: list[bytes] = []
        status = 0

        async def keep(message: Message) -> None:
            nonlocal status
            status = message.get("status", status)
            body = message.get("body", b"")
            if sum(map(len, parts)) < _MOST:
                parts.append(body)
                if message["type"] == "http.response.body" and not message.get("more_body"):
                    self._kept[path, status].append(b"".join(parts))
            await send(message)

        await self._app(scope, receive, keep)

    def judge(self) -> None:
        """Judge the answers that came to their end.

        Raises:
            AssertionError: One is not what the schema of its endpoint says.
        """
        for (path, status), bodies in self._kept.items():
            for text in map(bytes.decode, bodies):
                try:
                    if text.startswith(("data: ", "event: ", ":")):
                        judge_stream(path, text)
                    elif text:
                        judge_body(path, status, json.loads(text))
                except (AssertionError, ValueError) as error:
                    raise AssertionError(f"{path} answered {status} with {text[:2000]}") from error
