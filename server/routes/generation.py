"""POST /v1/chat/completions and /v1/completions: from a body to an `Ask`; the answering is answering.py's.

Other forms of chats become an `Ask` through `chat_ask` as well: messages.py and responses.py beside this file.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from starlette.types import Receive, Scope, Send

from headrace.engine.tools import ToolParser, make_parser
from headrace.server.answering import Answering, Ask
from headrace.server.body import ClientGone, read_json
from headrace.server.connection import Connection
from headrace.server.errors import ApiError, error_response
from headrace.server.gate import CALLER, REQUEST_ID
from headrace.server.protocol.answers import Answer, Header
from headrace.server.protocol.chat import ChatFields
from headrace.server.protocol.chat_answer import ChatAnswer
from headrace.server.protocol.completions import CompletionAnswer, CompletionFields, prompts_of
from headrace.server.protocol.fields import parse
from headrace.server.service import Service
from headrace.server.sse import DATA, Framing, TokenEvents

__all__ = ["GenerationRoute", "MakeParser", "ask_chat", "ask_completion", "chat_ask"]

MakeParser = Callable[[], ToolParser]
"""Makes what reads the tool calls and the reasoning of one choice."""


class GenerationRoute:
    """An endpoint that generates, as an ASGI application."""

    def __init__(self, ask: Callable[[Service, dict[str, Any]], Ask], framing: Framing = DATA) -> None:
        """Serve what `ask` makes of a body, in streams of that framing."""
        self._ask = ask
        self._framing = framing

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        service: Service = scope["app"].state.service
        service.check_accepting()  # before a body is read
        service.limits.check_queue()
        try:
            body = await read_json(scope, receive, service.settings)
        except ClientGone:
            return
        ask, timeout = self._ask(service, body), _timeout(scope)
        settings = service.settings
        connection = Connection(receive, send, stall_timeout=settings.stall_timeout)
        refuse = partial(error_response, scope=scope)
        events = TokenEvents(connection, refuse, framing=self._framing, ping_seconds=settings.ping_seconds)
        answering = Answering(service, ask, events, scope[CALLER], scope[REQUEST_ID], timeout)
        await connection.run(answering.answer, answering.tick)


def _timeout(scope: Scope) -> float | None:
    """Seconds that the client gives its request, if it says so."""
    for name, value in scope["headers"]:
        if name == b"x-request-timeout":
            try:
                seconds = float(value)
            except ValueError:
                seconds = 0.0
            if not 0.0 < seconds < float("inf"):
                raise ApiError(400, "invalid_value", "X-Request-Timeout: must be seconds, above 0")
            return seconds
    return None


def ask_chat(service: Service, body: dict[str, Any]) -> Ask:
    """What a chat completion asks for.

    Raises:
        ApiError: The body asks for nothing that can be done.
    """
    fields: ChatFields = parse(ChatFields, body, service.settings)
    service.check_model(fields.model)

    def make_answer(prompt: list[int], parser: MakeParser | None) -> Answer:
        header = Header.new("chatcmpl", service.now(), fields.model)
        return ChatAnswer(header, fields.n or 1, include_usage=fields.include_usage, make_parser=parser)

    return chat_ask(service, fields, make_answer)


def chat_ask(
    service: Service,
    fields: ChatFields,
    make_answer: Callable[[list[int], MakeParser | None], Answer],
    names: Mapping[str, str] | None = None,
) -> Ask:
    """What a chat asks for, whatever its answer looks like.

    Args:
        service: The server.
        fields: The chat.
        make_answer: Makes the answer, given the prompt as token ids, and what reads tool calls and reasoning where
            there may be some.
        names: What the client calls fields whose names here are others.

    Raises:
        ApiError: It asks for nothing that can be done.
    """
    allowed, tools = fields.offered()
    if allowed and service.tool_format is None:
        message = "tools: the chat template of this model teaches no known format of tool calls"
        raise ApiError(400, "unsupported_parameter", message, param="tools")
    forced = {"skip_special_tokens": False} if allowed and service.keeps_special_tokens() else {}
    params = fields.sampling(max_tokens=fields.limit, **forced)

    def answer_to(prompts: list[list[int]]) -> Answer:
        reasoning = service.reasoning(prompts[0])
        tool_format = service.tool_format if allowed else None
        parses = tool_format is not None or reasoning != "none"
        return make_answer(prompts[0], partial(make_parser, tool_format, reasoning) if parses else None)

    return Ask(
        prompts=[fields.chat()],
        params=params,
        tools=tools,
        limit=fields.limit,
        cache_salt=fields.cache_salt,
        priority=fields.priority or 0,
        streams=fields.streams,
        names=names or {},
        make_answer=answer_to,
    )


def ask_completion(service: Service, body: dict[str, Any]) -> Ask:
    """What a completion asks for.

    Raises:
        ApiError: The body asks for nothing that can be done.
    """
    fields: CompletionFields = parse(CompletionFields, body, service.settings, {"logprobs": ()})
    service.check_model(fields.model)
    prompts = prompts_of(fields.prompt, service.settings.max_prompts)
    params = fields.sampling(max_tokens=fields.limit)

    def make_answer(ids: list[list[int]]) -> Answer:
        echoes: list[str] = []
        if fields.echo:
            texts = [prompt if isinstance(prompt, str) else service.engine.detokenize(prompt) for prompt in prompts]
            echoes = [text for text in texts for _ in range(params.n)]
        header = Header.new("cmpl", service.now(), fields.model)
        return CompletionAnswer(header, len(ids) * params.n, include_usage=fields.include_usage, echoes=echoes)

    return Ask(
        prompts=list(prompts),
        params=params,
        limit=fields.max_tokens,
        cache_salt=fields.cache_salt,
        priority=fields.priority or 0,
        streams=fields.streams,
        make_answer=make_answer,
    )
