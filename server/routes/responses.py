"""POST /v1/responses: from a body to the `Ask` of the chat that it means, which may continue a stored response."""

from __future__ import annotations

import secrets
from array import array
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import orjson

from headrace.engine import HeadraceError, SamplingParams
from headrace.server.answering import Ask
from headrace.server.auth import ANYBODY, Caller
from headrace.server.errors import ApiError, as_api_error
from headrace.server.http.sse import TYPED
from headrace.server.protocol.answers import Answer
from headrace.server.protocol.chat import ChatFields
from headrace.server.protocol.fields import parse
from headrace.server.protocol.forms.response_items import following_items, listed_items, read_items
from headrace.server.protocol.forms.responses import RESPONSE_NAMES, RESPONSE_REFUSED, ResponseFields
from headrace.server.protocol.forms.responses_answer import ResponseAnswer
from headrace.server.routes.generation import GenerationRoute, Reading, chat_ask
from headrace.server.service import Service
from headrace.server.stored import StoredResponse

__all__ = ["ResponseRoute", "ask_response"]


class ResponseRoute(GenerationRoute):
    """The endpoint, whose requests may continue a response that their caller has stored."""

    def __init__(self) -> None:
        """Serve responses."""
        super().__init__(ask_response, TYPED)

    def ask(self, service: Service, body: dict[str, Any], caller: Caller) -> Ask:
        """Do what `ask_response` does, for the caller as the tenant."""
        return ask_response(service, body, caller.name)


def ask_response(service: Service, body: dict[str, Any], tenant: str = ANYBODY.name) -> Ask:
    """Return the `Ask` of a response.

    Args:
        service: The server.
        body: The body as the client sent it.
        tenant: Tenant whose stored responses the request may continue, and for whom the new one is stored.

    Raises:
        ApiError: The body asks for nothing that can be done, or continues a response that is not stored.
    """
    fields: ResponseFields = parse(ResponseFields, body, service.settings, RESPONSE_REFUSED)
    service.check_model(fields.model)
    stores = _stores(service, fields)
    before = _before(service, tenant, fields.previous_response_id)
    earlier = b"[]" if before is None else following_items(before.items, before.body)

    def make_answer(prompt: list[int], params: SamplingParams, reading: Reading) -> Answer:
        known = _known(fields, service.now(), stores, service.engine.info.generation_defaults)
        return ResponseAnswer(known, reading.blocks(), store(prompt) if stores else None)

    def store(prompt: list[int]) -> Callable[[dict[str, Any], list[int]], None]:
        def put(response: dict[str, Any], answer: list[int]) -> None:
            items = orjson.dumps(orjson.loads(earlier) + listed_items(fields.input))
            ids = array("i", [*prompt, *answer] if answer else [])
            service.responses.put(tenant, response["id"], StoredResponse(orjson.dumps(response), items, head, ids))

        return put

    try:
        chat: ChatFields = parse(ChatFields, fields.chat(read_items(earlier)), service.settings)
        ask = chat_ask(service, chat, make_answer, RESPONSE_NAMES)
        head = orjson.dumps([fields.instructions, ask.tools, ask.adapter, ask.ending.get("template_kwargs")])
        return ask if before is None or before.head != head else _going_on(service, ask, fields, before)
    except (ApiError, HeadraceError) as error:
        raise as_api_error(error).renamed(RESPONSE_NAMES) from error


def _stores(service: Service, fields: ResponseFields) -> bool:
    """Return whether the response is to be stored, which is the default where the server stores any.

    Raises:
        ApiError: The client wants it stored, and the server stores none.
    """
    if service.responses.most:
        return fields.store is not False
    if fields.store:
        message = "store: this server stores no responses; send the whole conversation as input, with store false"
        raise ApiError(400, "unsupported_parameter", message, param="store")
    return False


def _before(service: Service, tenant: str, identity: str | None) -> StoredResponse | None:
    """Return the stored response that this one continues; None where `identity` is None.

    Raises:
        ApiError: The tenant has no stored response of that id.
    """
    if identity is None:
        return None
    try:
        return service.responses.get(tenant, identity)
    except ApiError:
        name = "previous_response_id"
        message = f"{name}: there is no stored response {identity!r}; it may have made room for newer ones"
        raise ApiError(400, "previous_response_not_found", message, param=name) from None


def _going_on(service: Service, ask: Ask, fields: ResponseFields, before: StoredResponse) -> Ask:
    """Return the same request, which continues the token ids of the turn before if it only adds to them."""
    if not before.token_ids:
        return ask
    added = fields.model_copy(update={"instructions": None}).chat()
    messages = parse(ChatFields, added, service.settings).chat()
    if messages[0]["role"] == "assistant":  # it belongs to the message that ended the turn before
        return ask
    return replace(ask, after=(before.token_ids, messages))


def _known(fields: ResponseFields, now: int, stores: bool, defaults: Mapping[str, float]) -> dict[str, Any]:
    """Return the fields that a response repeats of its request, with the model's defaults where that has none."""
    tools = [tool.get("function", tool) for tool in fields.tools or ()]
    return {
        "id": f"resp_{secrets.token_hex(16)}",
        "object": "response",
        "created_at": now,
        "access_programs": None,
        "background": False,
        "completed_at": None,
        "conversation": None,
        "error": None,
        "frequency_penalty": fields.frequency_penalty or 0.0,
        "incomplete_details": None,
        "instructions": fields.instructions,
        "max_output_tokens": fields.max_output_tokens,
        "max_tool_calls": None,
        "metadata": fields.metadata or {},
        "model": fields.model,
        "parallel_tool_calls": fields.parallel_tool_calls is not False,
        "presence_penalty": fields.presence_penalty or 0.0,
        "previous_response_id": fields.previous_response_id,
        "prompt_cache_key": fields.prompt_cache_key,
        "prompt_cache_retention": None,
        "reasoning": {"effort": (fields.reasoning or {}).get("effort"), "summary": None},
        "safety_identifier": fields.safety_identifier,
        "service_tier": "default",
        "store": stores,
        "temperature": defaults.get("temperature", 1.0) if fields.temperature is None else fields.temperature,
        "text": {"format": (fields.text.format if fields.text is not None else None) or {"type": "text"}},
        "tool_choice": fields.tool_choice or "auto",
        "tools": [
            {
                "type": "function",
                "name": tool["name"],
                "description": tool.get("description"),
                "parameters": tool.get("parameters"),
                "strict": False,  # arguments are not made to fit the schema
            }
            for tool in tools
        ],
        "top_logprobs": 0,
        "top_p": defaults.get("top_p", 1.0) if fields.top_p is None else fields.top_p,
        "truncation": "disabled",
        "user": fields.user,
    }
