"""The OpenAPI document of a server: one line for each endpoint, schemas from the pydantic models; serves nothing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, NamedTuple

from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from headrace.server.protocol.adapters import AdapterCard, AdapterFields, AdapterGone, AdapterList
from headrace.server.protocol.chat import ChatFields
from headrace.server.protocol.completions import CompletionFields
from headrace.server.protocol.document import bodies, form_bodies
from headrace.server.protocol.forms.messages import CountFields, MessageFields
from headrace.server.protocol.forms.responses import ResponseFields
from headrace.server.protocol.vectors import (
    EmbeddingFields,
    EmbeddingList,
    RankList,
    RerankFields,
    ScoreFields,
    ScoreList,
)
from headrace.server.settings import KeyLimits

__all__ = ["Operation", "document"]

_REF: Final = "#/components/schemas/{model}"
_ERRORS: Final = {
    400: "A field is malformed or out of range, or the request can never run.",
    401: "No valid key was given.",
    403: "The key, the Host or the Origin may not ask this.",
    404: "There is nothing of that name.",
    405: "The endpoint does not take that method.",
    408: "The body did not arrive in time.",
    413: "The body is too large.",
    414: "The URL is too long.",
    415: "The body is not application/json.",
    429: "The key is over its limits; Retry-After says when to come again.",
    431: "The headers are too large.",
    500: "The request failed.",
    503: "The server is full, shutting down or has stopped; Retry-After says when to come again, if ever.",
}
_EVENT: Final = {
    "type": "object",
    "properties": {"data": {"type": "string"}, "event": {"type": "string"}},
    "required": ["data"],
}
"""One server-sent event: before OpenAPI 3.2, readers take the schema of an event stream for that of each event."""
_ALWAYS: Final = (401, 403, 405, 414, 431, 500)
_OF_BODIES: Final = (400, 408, 413, 415)


class Operation(NamedTuple):
    """One endpoint and method."""

    method: str
    path: str
    summary: str
    answer: type[BaseModel] | None
    """Schema of the answer; None is plain text."""
    takes: type[BaseModel] | None = None
    streams: type[BaseModel] | None = None
    """Schema of the data of events, which come instead of `answer` where `stream` is true."""
    errors: Sequence[int] = ()
    """Statuses besides those that every endpoint, or every one with a body, may answer with."""
    public: bool = False
    """Whether the endpoint needs no key."""
    error: type[BaseModel] = bodies.Error
    """Schema of the endpoint's errors."""
    ends: str = "the last is `[DONE]`, or an Error where it ends badly"
    """Clause about the last event of a stream."""


def operations(tokenize: type[BaseModel], detokenize: type[BaseModel]) -> list[Operation]:
    """Return all HTTP endpoints; the schemas of the bodies of /tokenize and /detokenize are arguments."""
    generates = (404, 429, 503)
    return [
        Operation(
            "post",
            "/v1/chat/completions",
            "Answer a chat. WebSocket clients may ask many on one socket here.",
            bodies.ChatCompletion,
            ChatFields,
            bodies.ChatChunk,
            generates,
        ),
        Operation(
            "post",
            "/v1/completions",
            "Continue texts or token ids.",
            bodies.TextCompletion,
            CompletionFields,
            bodies.CompletionChunk,
            generates,
        ),
        Operation(
            "post",
            "/v1/responses",
            "Answer a chat, as a response, perhaps after one that is stored.",
            form_bodies.ResponseBody,
            ResponseFields,
            form_bodies.ResponseEvent,
            generates,
            ends="the last has the type response.completed, response.incomplete or response.failed",
        ),
        *_stored_operations(),
        *_message_operations(),
        Operation(
            "post", "/v1/embeddings", "Vectors of texts or token ids.", EmbeddingList, EmbeddingFields, None, generates
        ),
        Operation("post", "/v1/score", "How well texts answer one.", ScoreList, ScoreFields, None, generates),
        Operation("post", "/v1/rerank", "Documents, the best first.", RankList, RerankFields, None, generates),
        Operation("get", "/v1/models", "Models that are served.", bodies.ModelList, errors=(503,)),
        Operation("get", "/v1/models/{model}", "One model.", bodies.ModelCard, errors=(404, 503)),
        Operation("post", "/tokenize", "Token ids of a text or a chat.", bodies.TokenIds, tokenize, errors=(404, 503)),
        Operation("post", "/detokenize", "Text of token ids.", bodies.TokenText, detokenize, errors=(404, 503)),
        Operation("get", "/tokenizer_info", "What makes tokens.", bodies.TokenizerCard, errors=(503,)),
        Operation("get", "/openapi.json", "This document.", bodies.OpenApi),
        Operation("get", "/health/live", "The process answers.", bodies.Health, public=True),
        Operation("get", "/health/ready", "The engine makes progress; 503 says why not.", bodies.Health, public=True),
        Operation("get", "/version", "The version of headrace.", bodies.Version),
        Operation("get", "/metrics", "All metrics, as Prometheus scrapes them; for admin and metrics keys.", None),
        *_admin_operations(),
    ]


def _message_operations() -> list[Operation]:
    return [
        Operation(
            "post",
            "/v1/messages",
            "Answer a chat, in the form of Anthropic's API.",
            form_bodies.MessageBody,
            MessageFields,
            form_bodies.MessageEvent,
            (404, 429, 503),
            error=form_bodies.MessageError,
            ends="the last has the type message_stop, or error where it ends badly",
        ),
        Operation(
            "post",
            "/v1/messages/count_tokens",
            "Count the tokens of a prompt, in the form of Anthropic's API.",
            form_bodies.MessageTokens,
            CountFields,
            errors=(404, 429, 503),
            error=form_bodies.MessageError,
        ),
    ]


def _stored_operations() -> list[Operation]:
    path, missing = "/v1/responses/{response_id}", (400, 404)
    items = "Items that a stored response was made from, as `limit`, `order` and `after` page them."
    return [
        Operation("get", path, "A stored response.", form_bodies.ResponseBody, errors=missing),
        Operation("delete", path, "Forget a stored response.", form_bodies.ResponseGone, errors=(404,)),
        Operation("get", f"{path}/input_items", items, form_bodies.InputItemList, errors=missing),
    ]


def _admin_operations() -> list[Operation]:
    limits, adapters = "/v1/admin/keys/{name}/limits", "/v1/adapters"
    return [
        Operation("get", limits, "What a key may use; for admin keys.", KeyLimits, errors=(404,)),
        Operation("get", adapters, "Adapters that are loaded; for admin keys.", AdapterList, errors=(503,)),
        Operation(
            "put",
            f"{adapters}/{{name}}",
            "Load an adapter from the server's folder, or put it in the place of what has its name; for admin keys.",
            AdapterCard,
            AdapterFields,
            errors=(503,),
        ),
        Operation(
            "delete",
            f"{adapters}/{{name}}",
            "Unload an adapter; requests that use it finish. For admin keys.",
            AdapterGone,
            errors=(404, 503),
        ),
        Operation("put", limits, "Change what a key may use; for admin keys.", KeyLimits, KeyLimits, errors=(404,)),
    ]


def document(endpoints: Sequence[Operation], *, root: str, keys: bool) -> dict[str, Any]:
    """Return the OpenAPI 3.1 document.

    Args:
        endpoints: All endpoints of the server.
        root: Path under which the application is mounted; empty where it stands alone.
        keys: Whether requests need one.
    """
    models: set[type[BaseModel]] = {each.error for each in endpoints}
    for each in endpoints:
        models.update(model for model in (each.answer, each.takes, each.streams) if model is not None)
    schemas = models_json_schema(
        [(model, "validation") for model in sorted(models, key=lambda model: model.__name__)], ref_template=_REF
    )[1]["$defs"]
    paths: dict[str, dict[str, Any]] = {}
    for each in endpoints:
        paths.setdefault(each.path, {})[each.method] = _operation(each, keys)
    components: dict[str, Any] = {"schemas": schemas}
    if keys:
        components["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
    return {
        "openapi": "3.1.0",
        "info": {"title": "headrace", "version": "1", "license": {"name": "Apache-2.0", "identifier": "Apache-2.0"}},
        "servers": [{"url": root or "/"}],
        "paths": paths,
        "components": components,
    }


def _operation(each: Operation, keys: bool) -> dict[str, Any]:
    found: dict[str, Any] = {"summary": each.summary, "responses": _responses(each, keys)}
    if each.takes is not None:
        found["requestBody"] = {"required": True, "content": _json(each.takes)}
    names = [part[1:-1] for part in each.path.split("/") if part.startswith("{")]
    if names:
        schema = {"type": "string", "minLength": 1}
        found["parameters"] = [{"name": name, "in": "path", "required": True, "schema": schema} for name in names]
    if keys:
        found["security"] = [] if each.public else [{"key": []}]
    return found


def _responses(each: Operation, keys: bool) -> dict[str, Any]:
    content: dict[str, Any] = {"text/plain": {"schema": {"type": "string"}}}
    if each.answer is not None:
        content = _json(each.answer)
    if each.streams is not None:
        name = each.streams.__name__
        said = f"Server-sent events. Data of each is a {name}; {each.ends}."
        schema = {**_EVENT, "description": said, "x-event": _ref(each.streams)}
        content["text/event-stream"] = {"schema": schema}
    statuses = {*_ALWAYS, *each.errors, *(_OF_BODIES if each.takes is not None else ())}
    if not keys or each.public:
        statuses.discard(401)
    responses: dict[str, Any] = {"200": {"description": each.summary, "content": content}}
    for status in sorted(statuses):
        responses[str(status)] = {"description": _ERRORS[status], "content": _json(each.error)}
    if each.answer is bodies.Health:
        responses["503"] = {"description": "Not ready.", "content": _json(bodies.Health)}
    return responses


def _json(model: type[BaseModel]) -> dict[str, Any]:
    return {"application/json": {"schema": _ref(model)}}


def _ref(model: type[BaseModel]) -> dict[str, str]:
    return {"$ref": _REF.format(model=model.__name__)}
