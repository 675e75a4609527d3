"""POST /tokenize and /detokenize: text and chats to token ids and back, as a request would see them."""

from __future__ import annotations

from typing import Annotated, Any

import anyio
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from headrace.engine import InvalidParams, Prompt
from headrace.server.body import announced, read_json
from headrace.server.errors import ApiError, as_api_error, shape_error
from headrace.server.gate import CALLER
from headrace.server.protocol.chat import Messages
from headrace.server.service import Service

__all__ = ["DetokenizeFields", "TokenizeFields", "detokenize", "tokenize"]


class TokenizeFields(BaseModel):
    """Body of POST /tokenize: a prompt or messages."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    model: Annotated[str, Field(strict=True)] | None = None
    prompt: Annotated[str, Field(strict=True)] | None = None
    messages: Messages | None = None


class DetokenizeFields(BaseModel):
    """Body of POST /detokenize."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    model: Annotated[str, Field(strict=True)] | None = None
    tokens: Annotated[list[Annotated[int, Field(strict=True)]], Field(fail_fast=True)]


async def tokenize(request: Request) -> Response:
    """Token ids of a text or a chat."""
    service: Service = request.app.state.service
    fields = await _fields(request, TokenizeFields)
    if (fields.prompt is None) == (fields.messages is None):
        raise ApiError(400, "missing_required_parameter", "prompt: give either prompt or messages", param="prompt")
    prompt: Prompt
    if fields.messages is not None:
        prompt = [message.for_template(place) for place, message in enumerate(fields.messages)]
    else:
        prompt = fields.prompt or ""
    caller = request.scope[CALLER]
    permit = service.limits.admit(caller, 1)
    try:
        with anyio.fail_after(service.settings.request_timeout):
            ids = await service.engine.tokenize(prompt, tenant=caller.name, charge=permit.made_tokens)
    except TimeoutError:
        raise ApiError(503, "deadline_exceeded", "the request took longer than it may") from None
    finally:
        permit.end()
    return JSONResponse({"count": len(ids), "max_model_len": service.engine.info.max_context, "tokens": ids})


async def detokenize(request: Request) -> Response:
    """Text of token ids."""
    service: Service = request.app.state.service
    fields = await _fields(request, DetokenizeFields)
    most = service.engine.info.max_context
    if len(fields.tokens) > most:
        message = f"tokens: {len(fields.tokens)} ids are more than the context of {most}"
        raise ApiError(400, "context_length_exceeded", message, param="tokens")
    permit = service.limits.admit(request.scope[CALLER], 1)
    permit.made_tokens(len(fields.tokens))
    permit.end()
    try:
        return JSONResponse({"prompt": service.engine.detokenize(fields.tokens)})
    except InvalidParams as error:
        raise as_api_error(error, {"prompt": "tokens"}) from None


async def _fields(request: Request, shape: type[BaseModel]) -> Any:
    service: Service = request.app.state.service
    with service.limits.upload(request.scope[CALLER], announced(request.scope, service.settings)):
        body = await read_json(request.scope, request.receive, service.settings)
    try:
        fields: Any = shape.model_validate(body)
    except ValidationError as error:
        raise shape_error(error) from None
    if fields.model is not None:
        service.check_model(fields.model)
    return fields
