"""POST /v1/messages and its count of tokens: from a body of Anthropic's API to the `Ask` of the chat that it means."""

from __future__ import annotations

from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from headrace.engine import HeadraceError, SamplingParams, TokenizeOptions
from headrace.server.answering import Ask
from headrace.server.errors import ApiError, as_api_error
from headrace.server.http.body import announced, read_json
from headrace.server.http.gate import CALLER
from headrace.server.protocol.answers import Answer
from headrace.server.protocol.chat import ChatFields
from headrace.server.protocol.fields import parse
from headrace.server.protocol.forms.messages import MESSAGE_REFUSED, MessageFields
from headrace.server.protocol.forms.messages_answer import MessageAnswer
from headrace.server.routes.generation import Reading, chat_ask
from headrace.server.routes.tokens import token_ids
from headrace.server.service import Service

__all__ = ["ask_message", "count_tokens"]


def ask_message(service: Service, body: dict[str, Any]) -> Ask:
    """Return the `Ask` of a message.

    Raises:
        ApiError: The body asks for nothing that can be done.
    """
    fields: MessageFields = parse(MessageFields, body, service.settings, MESSAGE_REFUSED)
    names = fields.names
    service.check_model(fields.model)

    def make_answer(prompt: list[int], params: SamplingParams, reading: Reading) -> Answer:
        return MessageAnswer(fields.model, len(prompt), reading.blocks())

    try:
        chat: ChatFields = parse(ChatFields, fields.chat(service.switches), service.settings)
        return chat_ask(service, chat, make_answer, names)
    except (ApiError, HeadraceError) as error:
        raise as_api_error(error).renamed(names) from error


async def count_tokens(request: Request) -> Response:
    """Count the tokens of the prompt of a message."""
    service: Service = request.app.state.service
    with service.limits.upload(request.scope[CALLER], announced(request.scope, service.settings)):
        body = await read_json(request.scope, request.receive, service.settings)
    ask = ask_message(service, body | {"max_tokens": 1})
    (prompt,) = ask.prompts
    options: TokenizeOptions = {**ask.ending, "tools": ask.tools}
    ids = await token_ids(request, prompt, **options)
    return JSONResponse({"input_tokens": len(ids)})
