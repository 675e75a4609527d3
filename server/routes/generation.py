"""POST /v1/chat/completions and /v1/completions: from a body to an `Ask`, which answering.py answers.

Other forms of chats become an `Ask` through `chat_ask` as well: messages.py and responses.py beside this file.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

from starlette.types import Receive, Scope, Send

from headrace.engine import Prompt, SamplingParams, TokenizeOptions
from headrace.engine.tools import ToolParser, format_names, parser_class
from headrace.server.answering import Answering, Ask
from headrace.server.auth import Caller
from headrace.server.errors import ApiError, error_response
from headrace.server.http.body import ClientGone, announced, read_json
from headrace.server.http.connection import Connection
from headrace.server.http.gate import CALLER, REQUEST_ID
from headrace.server.http.sse import DATA, Framing, TokenEvents
from headrace.server.observability.telemetry import EXCHANGE
from headrace.server.protocol.answers import Answer, Header
from headrace.server.protocol.blocks import BlockReader
from headrace.server.protocol.chat import ChatFields
from headrace.server.protocol.chat_answer import ChatAnswer
from headrace.server.protocol.completions import CompletionAnswer, CompletionFields, Echo, prompts_of
from headrace.server.protocol.fields import RequestFields, parse
from headrace.server.protocol.forced import answer_format
from headrace.server.protocol.logprobs import Aligned
from headrace.server.protocol.ranking import BestOf
from headrace.server.service import Service

__all__ = ["GenerationRoute", "Reading", "ask_chat", "ask_completion", "chat_ask", "take_body", "timeout_of"]


class Reading(NamedTuple):
    """The way to read the text of a choice."""

    make_parser: Callable[[], ToolParser] | None
    """Function that makes the parser of tool calls and reasoning; None where there are none."""
    parallel_calls: bool
    """Whether there may be several calls."""
    only_calls: bool
    """Whether calls are forced, so that there is no content."""

    def blocks(self) -> BlockReader:
        """Return a reader of blocks."""
        parser = self.make_parser() if self.make_parser is not None else None
        return BlockReader(parser, parallel=self.parallel_calls, only_calls=self.only_calls)


_MAX_ECHOED = 2**17
"""Largest number of log-probabilities of echoed prompts in one answer: they hold the event loop for 0.1 s."""


class GenerationRoute:
    """An endpoint that generates, as an ASGI application."""

    def __init__(self, ask: Callable[[Service, dict[str, Any]], Ask], framing: Framing = DATA) -> None:
        """Serve the `Ask` that `ask` makes of a body, in streams of `framing`."""
        self._ask = ask
        self._framing = framing

    def ask(self, service: Service, body: dict[str, Any], caller: Caller) -> Ask:
        """Return the `Ask` of a body from `caller`.

        Raises:
            ApiError: The body asks for nothing that can be done.
        """
        return self._ask(service, body)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        service: Service = scope["app"].state.service
        try:
            body = await take_body(service, scope, receive)
        except ClientGone:
            return
        timeout, settings = timeout_of(scope), service.settings
        connection = Connection(receive, send, stall_timeout=settings.stall_timeout)
        refuse = partial(error_response, scope=scope)
        events = TokenEvents(connection, refuse, framing=self._framing, ping_seconds=settings.ping_seconds)
        ask = self.ask(service, body, scope[CALLER])
        answering = Answering(service, ask, events, scope[CALLER], scope[REQUEST_ID], timeout)
        del body  # the body may be large, and the answer long
        scope[EXCHANGE].figures = answering.figures
        await connection.run(answering.answer, answering.tick)


async def take_body(service: Service, scope: Scope, receive: Receive) -> dict[str, Any]:
    """Return the body of a request; refuse a request for which the server has no room before reading it.

    Raises:
        ApiError: The server drains, its queue is full, or the body is not what may be sent.
        ClientGone: The client went away meanwhile.
    """
    service.check_accepting()
    service.limits.check_queue()
    with service.limits.upload(scope[CALLER], announced(scope, service.settings)):
        return await read_json(scope, receive, service.settings)


def timeout_of(scope: Scope) -> float | None:
    """Return the seconds that the client gives its request, if it says so."""
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
    """Return the `Ask` of a chat completion.

    Raises:
        ApiError: The body asks for nothing that can be done.
    """
    fields: ChatFields = parse(ChatFields, body, service.settings)

    def make_answer(prompt: list[int], params: SamplingParams, reading: Reading) -> Answer:
        return ChatAnswer(
            Header.new("chatcmpl", service.now(), fields.model, service.fingerprint),
            params.n,
            include_usage=fields.include_usage,
            make_parser=reading.make_parser,
            make_aligned=_aligned(service, params) if params.logprobs is not None else None,
            parallel_calls=reading.parallel_calls,
            only_calls=reading.only_calls,
        )

    return chat_ask(service, fields, make_answer)


def _prompt_options(service: Service, fields: ChatFields) -> TokenizeOptions:
    """Return the options for the end of a chat's prompt, and for the values that its template reads.

    Raises:
        ApiError: The chat asks for an end or for values that the model does not have.
    """
    values = fields.template_kwargs(service.switches, reasons=service.reasons)
    return {**fields.ending, "template_kwargs": values} if values else fields.ending


def chat_ask(
    service: Service,
    fields: ChatFields,
    make_answer: Callable[[list[int], SamplingParams, Reading], Answer],
    names: Mapping[str, str] | None = None,
) -> Ask:
    """Return the `Ask` of a chat, whatever the form of its answer.

    Args:
        service: The server.
        fields: The chat.
        make_answer: Function that makes the answer from the prompt's ids, the sampling parameters and the `Reading`.
        names: Name of a chat's field -> the name that the client uses, where they differ.

    Raises:
        ApiError: The chat asks for nothing that can be done.
    """
    offered, ending = fields.offered(), _prompt_options(service, fields)
    begun = (fields.messages[-1].content or "") if ending.get("continue_final_message") else ""
    if offered.allowed and service.tool_format is None:
        message = (
            "tools: the chat template of this model teaches no known format of tool calls; the server can be given "
            f"one with --tool-call-parser (tool_call_parser of ServerSettings): {', '.join(format_names())}"
        )
        raise ApiError(400, "unsupported_parameter", message, param="tools")
    keeps = service.keeps_special_tokens(calls=bool(offered.allowed))
    forced = {"skip_special_tokens": False} if keeps else {}
    params = fields.sampling(max_tokens=fields.limit, logprobs=fields.reports, **forced)
    wanted = None if offered.forced else params.response_format
    calls = None
    if offered.allowed:
        calls = offered.structure(parser_class(service.tool_format), instead=wanted is not None)
    known = {"prompt": (names or {}).get("messages", "messages")} | fields.names | dict(names or {})
    if offered.forced:
        known["response_format"] = "tool_choice"

    def refine(params: SamplingParams, prompts: list[list[int]]) -> SamplingParams:
        answer = answer_format(wanted, calls, service.reasoning(prompts[0], begun), service.tags)
        others = params.model_dump(exclude={"response_format"}, exclude_unset=True)
        return SamplingParams(**others, response_format=answer)  # checked anew: not all goes with a format

    def answer_to(prompts: list[list[int]]) -> Answer:
        parser = service.make_parser(service.reasoning(prompts[0], begun), offered.allowed)
        return make_answer(prompts[0], params, Reading(parser, offered.parallel is not False, offered.forced))

    return _ask(
        service,
        fields,
        params,
        prompts=[fields.chat()],
        tools=offered.template,
        ending=ending,
        limit=fields.limit,
        refine=refine if wanted is not None or calls is not None else None,
        names=known,
        make_answer=answer_to,
    )


def ask_completion(service: Service, body: dict[str, Any]) -> Ask:
    """Return the `Ask` of a completion.

    Raises:
        ApiError: The body asks for nothing that can be done.
    """
    fields: CompletionFields = parse(CompletionFields, body, service.settings)
    prompts = prompts_of(fields.prompt, service.settings.max_prompts)
    reports = {"logprobs": fields.logprobs, "prompt_logprobs": fields.logprobs if fields.echo else None}
    params = fields.sampling(max_tokens=fields.limit, **reports)

    def refine(params: SamplingParams, ids: list[list[int]]) -> SamplingParams:
        _check_echo(params, ids)
        return params

    def make_answer(ids: list[list[int]]) -> Answer:
        echoes: list[Echo] = []
        most = service.engine.info.max_context  # longer prompts are refused without their text
        if fields.echo and max(map(len, ids)) < most:
            detokenize = service.engine.detokenize
            for prompt, tokens in zip(prompts, ids, strict=True):
                text = prompt if isinstance(prompt, str) else detokenize(tokens)
                first = detokenize(tokens[:1], skip_special_tokens=False)
                echoes += [Echo(text, tokens, first)] * params.n
        return CompletionAnswer(
            Header.new("cmpl", service.now(), fields.model, service.fingerprint),
            len(ids) * params.n,
            include_usage=fields.include_usage,
            echoes=echoes,
            only_echoes=fields.max_tokens == 0,
            logprobs=fields.logprobs,
            make_aligned=_aligned(service, params),
        )

    return _ask(
        service,
        fields,
        params,
        prompts=list(prompts),
        several=prompts[0] is not fields.prompt,
        ending={"add_special_tokens": fields.add_special_tokens is not False},
        limit=fields.max_tokens,
        refine=refine,
        names=fields.names,
        make_answer=make_answer,
    )


def _ask(
    service: Service,
    fields: RequestFields,
    params: SamplingParams,
    *,
    prompts: list[Prompt],
    names: dict[str, str],
    make_answer: Callable[[list[list[int]]], Answer],
    **more: Any,
) -> Ask:
    """Return the `Ask` of either endpoint; with `best_of`, it has more choices than `make_answer` knows."""
    returned, best_of = params.n, params.best_of
    if best_of is not None:
        if params.logprobs is None:
            names = names | {"logprobs": "best_of"}
        params = params.replace(n=best_of, best_of=None, logprobs=params.logprobs or 0)

    def make_ranked(ids: list[list[int]]) -> Answer:
        answer = make_answer(ids)
        return answer if best_of is None else BestOf(answer, len(ids), params.n, returned)

    return Ask(
        prompts=prompts,
        params=params,
        adapter=service.adapter_of(fields.model, fields.adapter),
        cache_salt=fields.cache_salt,
        priority=fields.priority or 0,
        streams=fields.streams,
        names=names,
        make_answer=make_ranked,
        **more,
    )


def _check_echo(params: SamplingParams, prompts: list[list[int]]) -> None:
    """Refuse an echo whose log-probabilities would hold up the event loop while they are written."""
    if params.prompt_logprobs is None:
        return
    count = sum(map(len, prompts)) * params.n * (1 + params.prompt_logprobs)
    if count > _MAX_ECHOED:
        message = f"logprobs: with echo at most {_MAX_ECHOED} in one answer, over all prompts and choices; got {count}"
        raise ApiError(400, "invalid_value", message, param="logprobs")


def _aligned(service: Service, params: SamplingParams) -> Callable[[], Aligned]:
    """Return a function that makes an empty `Aligned` for a choice."""

    def hides(token: int) -> bool:
        return not service.engine.detokenize([token], skip_special_tokens=params.skip_special_tokens)

    return lambda: Aligned(hides)
