"""POST /tokenize and /detokenize: text and chats to token ids and back; GET /tokenizer_info: the tokenizer."""

from __future__ import annotations

from typing import Annotated, Any, Unpack

import anyio
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from headrace.engine import InvalidParams, Prompt, TokenizeOptions
from headrace.server.errors import ApiError, as_api_error, shape_error
from headrace.server.http.body import announced, read_json
from headrace.server.http.gate import CALLER
from headrace.server.protocol.chat import Messages, ending_of
from headrace.server.protocol.template_fields import TemplateFields
from headrace.server.service import Service

__all__ = ["DetokenizeFields", "TokenizeFields", "detokenize", "show_tokenizer", "token_ids", "tokenize"]


class TokenizeFields(TemplateFields):
    """Body of POST /tokenize: a prompt or messages."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    model: Annotated[str, Field(strict=True)] | None = None
    prompt: Annotated[str, Field(strict=True)] | None = None
    messages: Messages | None = None
    tools: Annotated[list[dict[str, Any]], Field(max_length=1_000)] | None = None
    add_special_tokens: Annotated[bool, Field(strict=True)] | None = None
    add_generation_prompt: Annotated[bool, Field(strict=True)] | None = None
    continue_final_message: Annotated[bool, Field(strict=True)] | None = None


class DetokenizeFields(BaseModel):
    """Body of POST /detokenize."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    model: Annotated[str, Field(strict=True)] | None = None
    tokens: Annotated[list[Annotated[int, Field(strict=True)]], Field(fail_fast=True)]


async def tokenize(request: Request) -> Response:
    """Return the token ids of a text or a chat."""
    service: Service = request.app.state.service
    fields = await _fields(request, TokenizeFields)
    if (fields.prompt is None) == (fields.messages is None):
        raise ApiError(400, "missing_required_parameter", "prompt: give either prompt or messages", param="prompt")
    prompt: Prompt = fields.prompt or ""
    ending = TokenizeOptions(add_special_tokens=fields.add_special_tokens is not False)
    if fields.messages is not None:
        if fields.add_special_tokens:
            message = "add_special_tokens: goes with prompt; a chat has the special tokens that its template writes"
            raise ApiError(400, "invalid_value", message, param="add_special_tokens")
        prompt = [message.for_template() for message in fields.messages]
        ending = ending_of(fields.messages[-1], fields.add_generation_prompt, fields.continue_final_message)
        ending["tools"] = fields.tools
        ending["template_kwargs"] = fields.template_kwargs(service.switches, reasons=service.reasons)
    ids = await token_ids(request, prompt, **ending)
    return JSONResponse({"count": len(ids), "max_model_len": service.engine.info.max_context, "tokens": ids})


async def token_ids(request: Request, prompt: Prompt, **options: Unpack[TokenizeOptions]) -> list[int]:
    """Return the token ids of a prompt, made in the caller's turn and counted among its requests.

    Raises:
        ApiError: The caller is over its limits, too many requests wait, or tokenising took too long.
        InvalidParams: The prompt is malformed.
    """
    service: Service = request.app.state.service
    caller = request.scope[CALLER]
    permit = service.limits.admit(caller, 1)
    try:
        with anyio.fail_after(service.settings.request_timeout):
            return await service.engine.tokenize(prompt, tenant=caller.name, charge=permit.made_tokens, **options)
    except TimeoutError:
        raise ApiError(503, "deadline_exceeded", "the request took longer than it may") from None
    finally:
        permit.end()


async def detokenize(request: Request) -> Response:
    """Return the text of token ids, control tokens included."""
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
        text = service.engine.detokenize(fields.tokens, skip_special_tokens=False)
    except InvalidParams as error:
        raise as_api_error(error, {"prompt": "tokens"}) from None
    return JSONResponse({"prompt": text})


async def show_tokenizer(request: Request) -> Response:
    """Describe the tokenizer without its vocabulary, in the words of vLLM and of Hugging Face's files."""
    service: Service = request.app.state.service
    info = service.engine.tokenizer_info
    added = {str(index): {"content": text, "special": True} for index, text in info.control_tokens.items()}
    special = dict.fromkeys(("bos_token", "eos_token", "unk_token", "pad_token")) | dict(info.special_tokens)
    return JSONResponse(
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            **special,
            "eos_token_ids": info.eos_ids,
            "added_tokens_decoder": added,
            "model_max_length": service.engine.info.max_context,
            "chat_template": info.chat_template or None,
        }
    )


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
