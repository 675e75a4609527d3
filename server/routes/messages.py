"""POST /v1/messages: from a body of Anthropic's API to the `Ask` of the chat that it means."""

from __future__ import annotations

from typing import Any

from headrace.engine import HeadraceError, SamplingParams
from headrace.server.answering import Ask
from headrace.server.errors import ApiError, as_api_error
from headrace.server.protocol.answers import Answer
from headrace.server.protocol.chat import ChatFields
from headrace.server.protocol.fields import parse
from headrace.server.protocol.messages import MESSAGE_NAMES, MESSAGE_REFUSED, MessageFields
from headrace.server.protocol.messages_answer import MessageAnswer
from headrace.server.routes.generation import Reading, chat_ask
from headrace.server.service import Service

__all__ = ["ask_message"]


def ask_message(service: Service, body: dict[str, Any]) -> Ask:
    """What a message asks for.

    Raises:
        ApiError: The body asks for nothing that can be done.
    """
    fields: MessageFields = parse(MessageFields, body, service.settings, MESSAGE_REFUSED)
    service.check_model(fields.model)

    def make_answer(prompt: list[int], params: SamplingParams, reading: Reading) -> Answer:
        return MessageAnswer(fields.model, len(prompt), reading.blocks())

    try:
        chat: ChatFields = parse(ChatFields, fields.chat(reasons=service.reasons), service.settings)
        return chat_ask(service, chat, make_answer, MESSAGE_NAMES)
    except (ApiError, HeadraceError) as error:
        raise as_api_error(error).renamed(MESSAGE_NAMES) from error
