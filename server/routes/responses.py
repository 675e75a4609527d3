"""POST /v1/responses: from a body to the `Ask` of the chat that it means; nothing is stored."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from typing import Any

from headrace.engine import HeadraceError, SamplingParams
from headrace.server.answering import Ask
from headrace.server.errors import ApiError, as_api_error
from headrace.server.protocol.answers import Answer
from headrace.server.protocol.chat import ChatFields
from headrace.server.protocol.fields import parse
from headrace.server.protocol.responses import RESPONSE_NAMES, RESPONSE_REFUSED, ResponseFields
from headrace.server.protocol.responses_answer import ResponseAnswer
from headrace.server.routes.generation import Reading, chat_ask
from headrace.server.service import Service

__all__ = ["ask_response"]


def ask_response(service: Service, body: dict[str, Any]) -> Ask:
    """What a response asks for.

    Raises:
        ApiError: The body asks for nothing that can be done.
    """
    if body.get("store") is True or body.get("previous_response_id") is not None:
        param = "store" if body.get("store") is True else "previous_response_id"
        message = f"{param}: this server stores no responses; send the whole conversation as input, with store false"
        raise ApiError(400, "unsupported_parameter", message, param=param)
    fields: ResponseFields = parse(ResponseFields, body, service.settings, RESPONSE_REFUSED)
    service.check_model(fields.model)

    def make_answer(prompt: list[int], params: SamplingParams, reading: Reading) -> Answer:
        return ResponseAnswer(_known(fields, service.now(), service.engine.info.generation_defaults), reading.blocks())

    try:
        chat: ChatFields = parse(ChatFields, fields.chat(), service.settings)
        return chat_ask(service, chat, make_answer, RESPONSE_NAMES)
    except (ApiError, HeadraceError) as error:
        raise as_api_error(error).renamed(RESPONSE_NAMES) from error


def _known(fields: ResponseFields, now: int, defaults: Mapping[str, float]) -> dict[str, Any]:
    """What a response repeats of its request, and what the model recommends where that says nothing."""
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
        "previous_response_id": None,
        "prompt_cache_key": fields.prompt_cache_key,
        "prompt_cache_retention": None,
        "reasoning": {"effort": None, "summary": None},
        "safety_identifier": fields.safety_identifier,
        "service_tier": "default",
        "store": False,
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
