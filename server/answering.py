"""`Answering`: one generation request from its parsed form to its end; the only place where streams are read.

Each request ends once: with its answer, or with one error. Its outlet decides how that is written: sse.py for HTTP,
websocket.py for sockets. This module never parses a body and knows no endpoint.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Protocol

import anyio

from headrace.engine import (
    Chunk,
    InvalidParams,
    Prompt,
    PromptTooLong,
    Rejected,
    ResponseFormat,
    SamplingParams,
    TokenizeOptions,
    TokenLogprobs,
    TokenStream,
)
from headrace.server.auth import Caller
from headrace.server.errors import ApiError, ContextExceeded, as_api_error
from headrace.server.limits import Permit
from headrace.server.observability.tracing import end_span, start_span
from headrace.server.protocol.answers import Answer, Piece, add_usage, pieces
from headrace.server.service import Service

__all__ = ["Answering", "Ask"]

logger = logging.getLogger("headrace.server")

_PromptLogprobs = list[TokenLogprobs | None] | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """A generation request in the engine's terms, the same for every endpoint."""

    prompts: list[Prompt]
    params: SamplingParams
    """Sampling parameters of each prompt."""
    tools: list[dict[str, Any]] | None = None
    ending: TokenizeOptions = field(default_factory=TokenizeOptions)
    """Options for writing the prompt of a chat."""
    after: tuple[Sequence[int], Prompt] | None = None
    """Token ids with which the only prompt begins and the prompt that follows them; None where they are not known."""
    several: bool = False
    """Whether the prompts came in a list, so that a refusal of one names its place there."""
    limit: int | None = None
    """`max_tokens` as the client gave it: a prompt that does not leave room for it is refused."""
    adapter: str | None = None
    cache_salt: str | None = None
    priority: int = 0
    streams: bool = False
    refine: Callable[[SamplingParams, list[list[int]]], SamplingParams] | None = None
    """Function that returns `params` with the changes that the prompts, given as token ids, call for."""
    names: Mapping[str, str] = field(default_factory=dict)
    """Engine's name of a field -> the name that the client used, where they differ."""
    make_answer: Callable[[list[list[int]]], Answer]
    """Function that makes the answer, given the prompts as token ids."""


class Outlet(Protocol):
    """The way by which an answer reaches its client, such as a stream of server-sent events."""

    started: bool
    """Whether something has been sent."""

    @property
    def lost(self) -> str:
        """Reason why the answer was cut off, where it was, such as `disconnected`."""
        ...

    async def start(self, opening: bytes) -> None:
        """Begin a stream with these events; later calls do nothing."""
        ...

    async def room(self, tokens: int) -> int:
        """Wait until one token or more may be sent, and return how many of `tokens` may."""
        ...

    async def push(self, frames: bytes, tokens: int) -> None:
        """Send events that hold `tokens` tokens, waiting while the client is behind."""
        ...

    async def finish(self, frames: bytes) -> None:
        """Send the last events of a stream that succeeded."""
        ...

    async def whole(self, answer: bytes) -> None:
        """Send a whole answer to a request that does not stream."""
        ...

    async def fail(self, error: ApiError, frames: bytes) -> None:
        """Tell the client of `error` and end the answer; `frames` are the events that say so in a stream."""
        ...

    async def ping(self, silent: float) -> None:
        """Send a sign of life if the `silent` seconds since the last event are many."""
        ...


def _made(prompts: list[list[int]]) -> Answer:
    raise AssertionError("an answer is made once")


def _prompt_logprobs(stream: TokenStream) -> _PromptLogprobs:
    return stream.prompt_logprobs


class Answering:
    """The course of one request until it is answered."""

    def __init__(
        self, service: Service, ask: Ask, outlet: Outlet, caller: Caller, request_id: str, timeout: float | None = None
    ) -> None:
        """Prepare to answer `ask` through `outlet` in `timeout` seconds, at most the server's `request_timeout`."""
        longest = service.settings.request_timeout
        self.figures = service.telemetry.begin(request_id, caller.name, ask.adapter or "")
        """Counts and times of the request, for its line in the log."""
        self._service = service
        self._ask = ask
        self._outlet = outlet
        self._caller = caller
        self._request_id = request_id
        self._timeout = longest if timeout is None else min(timeout, longest)
        self._scope = anyio.CancelScope()
        self._streams: list[TokenStream] = []
        self._answer: Answer | None = None
        self._opening = b""
        self._began = time.monotonic()
        self._ended_by: ApiError | None = None
        self._permit: Permit | None = None

    def end(self, error: ApiError) -> None:
        """End the request now and tell the client `error`."""
        if self._ended_by is None:
            self._ended_by = error
        self._scope.cancel()

    # -- course of the request --------------------------------------------------------------------------------------

    async def answer(self) -> None:
        """Answer the request: return when the last byte was sent, and raise nothing."""
        service, figures = self._service, self.figures
        span = None
        try:
            span = start_span(figures, self._ask.prompts, self._ask.params, service.model)
            service.check_accepting()
            self._permit = self._admit()
            service.running.add(self)
            self._scope.deadline = anyio.current_time() + self._timeout
            with self._scope:
                await self._generate(self._permit)
            if self._scope.cancelled_caught:
                late = ApiError(503, "deadline_exceeded", "the request took longer than it may")
                raise self._ended_by or late
            figures.reason = "finished"
        except Exception as error:
            await self._fail(error)
        finally:
            service.running.discard(self)
            if self._permit is not None:
                self._permit.end(refund=self._is_untouched)
            figures.reason = figures.reason or self._outlet.lost
            service.telemetry.end(figures, self._streams, admitted=self._permit is not None)
            if span is not None:
                end_span(span, figures)

    @property
    def _is_untouched(self) -> bool:
        """Whether no step has computed anything for this request."""
        return all(stream.queued for stream in self._streams)

    def _admit(self) -> Permit:
        params, prompts = self._ask.params, len(self._ask.prompts)
        rows = max(params.n, params.beam_width or 1)
        return self._service.limits.admit(self._caller, prompts * rows, self._ask.priority)

    async def _generate(self, permit: Permit) -> None:
        try:
            answer = await self._begin(permit)
            await self._read_all(answer)
            usage = add_usage([stream.usage for stream in self._streams])
            if self._ask.streams:
                await self._outlet.start(self._opening)
                await self._outlet.finish(answer.closing(usage))
            else:
                await self._outlet.whole(answer.whole(usage))
        finally:
            for stream in self._streams:
                stream.cancel()

    async def _begin(self, permit: Permit) -> Answer:
        """Tokenise the prompts and start their streams; release what only this needed, most of it text."""
        ask, engine = self._ask, self._service.engine
        prompts: list[list[int]] = []
        for place, prompt in enumerate(ask.prompts):
            with self._naming(place):
                ids = await self._token_ids(prompt, permit)
            prompts.append(ids)
        self._service.telemetry.tokenized(self.figures)
        self._check_room(prompts)
        permit.add_prompt(sum(map(len, prompts)))
        answer = self._answer = ask.make_answer(prompts)
        params = ask.params if ask.refine is None else ask.refine(ask.params, prompts)
        self._opening = answer.opening() if ask.streams else b""
        tenant = self._caller.name
        salt = None if ask.cache_salt is None else f"{tenant}\n{ask.cache_salt}"  # shared by one tenant only
        for ids in prompts:
            stream = engine.stream(
                ids,
                params,
                adapter=ask.adapter,
                tenant=tenant,
                cache_salt=salt,
                priority=ask.priority,
                charge=permit.spend,
            )
            self._streams.append(stream)
        for place, stream in enumerate(self._streams):
            with self._naming(place):
                await stream.admitted()
        self._ask = replace(ask, prompts=[], after=None, tools=None, refine=None, make_answer=_made)
        return answer

    async def _token_ids(self, prompt: Prompt, permit: Permit) -> list[int]:
        """Return the token ids of `prompt`; tokenise only what follows known ids if the chat template allows that."""
        ask, engine = self._ask, self._service.engine
        tokenize = partial(engine.tokenize, tools=ask.tools, tenant=self._caller.name, charge=permit.made_tokens)
        if ask.after is not None:
            known, added = ask.after
            with suppress(InvalidParams, PromptTooLong):
                ids = await tokenize(added, after=known, template_kwargs=ask.ending.get("template_kwargs"))
                if len(ids) < engine.info.max_context:  # the template may leave out what it no longer needs
                    return ids
        return await tokenize(prompt, **ask.ending)

    @contextmanager
    def _naming(self, place: int) -> Iterator[None]:
        """Say in a refusal which of several prompts it is about."""
        try:
            yield
        except Rejected as error:
            field = error.field or ""
            if not self._ask.several or not field.startswith("prompt"):
                raise
            told, name = as_api_error(error), f"prompt[{place}]"
            raise told.at(name + field.removeprefix("prompt"), name + told.detail.removeprefix("prompt")) from None

    def _check_room(self, prompts: list[list[int]]) -> None:
        """Refuse a prompt that is too long for the context, or that leaves too little of it for the client's limit.

        Raises:
            ContextExceeded: Names the prompt, or the limit.
        """
        ask, most = self._ask, self._service.engine.info.max_context
        for place, ids in enumerate(prompts):
            name = ask.names.get("prompt", f"prompt[{place}]" if ask.several else "prompt")
            if len(ids) >= most:
                raise ContextExceeded(most, len(ids), ask.limit or 1, param=name)
            if ask.limit is not None and len(ids) + ask.limit > most:
                limit = ask.names.get("max_tokens", "max_tokens")
                raise ContextExceeded(most, len(ids), ask.limit, param=limit, sized=name)

    async def _read_all(self, answer: Answer) -> None:
        """Read every prompt's stream to its end."""
        choices = self._ask.params.n
        if len(self._streams) == 1:
            await self._read(self._streams[0], answer, 0)
            return
        failures: list[Exception] = []

        async def read(stream: TokenStream, first: int) -> None:
            try:
                await self._read(stream, answer, first)
            except Exception as error:
                failures.append(error)
                tasks.cancel_scope.cancel()

        async with anyio.create_task_group() as tasks:
            for place, stream in enumerate(self._streams):
                tasks.start_soon(read, stream, place * choices)
        if failures:
            raise failures[0]

    async def _read(self, stream: TokenStream, answer: Answer, first: int) -> None:
        """Read one stream to its end; its choices count from `first`."""
        ask, permit = self._ask, self._permit
        assert permit is not None
        arrivals, prompt = self.figures.arrivals(stream, ask.params.n), None
        while (chunk := await stream.next_chunk()) is not None:
            arrivals.came(len(chunk.tokens))
            permit.started()
            if ask.params.prompt_logprobs is not None and prompt is None:
                prompt = await anyio.to_thread.run_sync(_prompt_logprobs, stream)  # up to a second of work
            permit.spend(len(chunk.tokens))
            if ask.streams:
                await self._send(chunk, answer, first, prompt)
            else:
                for piece in self._pieces(chunk, first, prompt):
                    answer.keep(piece)
        arrivals.end()

    async def _send(self, chunk: Chunk, answer: Answer, first: int, prompt: _PromptLogprobs) -> None:
        """Send a chunk of a stream, in as many parts as its outlet has room for at a time."""
        tokens = chunk.tokens
        while tokens:
            room = await self._outlet.room(len(tokens))
            if room < len(tokens):
                chunk = Chunk(text="".join([token.text for token in tokens[:room]]), tokens=tokens[:room])
            elif chunk.tokens is not tokens:
                chunk = Chunk(text="".join([token.text for token in tokens]), tokens=tokens)
            tokens = tokens[room:]
            frames = b"".join([answer.feed(piece) for piece in self._pieces(chunk, first, prompt)])
            if frames:
                await self._outlet.start(self._opening)
                await self._outlet.push(frames, len(chunk.tokens))
                await self._service.pacer.turn()

    def _pieces(self, chunk: Chunk, first: int, prompt: _PromptLogprobs) -> Sequence[Piece]:
        found = pieces(chunk, self._ask.params.n, first, prompt)
        if any(piece.finish_reason == "cancelled" for piece in found):
            raise self._service.shutting_down()  # the engine was closed meanwhile
        return found

    async def _fail(self, error: Exception) -> None:
        told = as_api_error(error, self._ask.names).renamed(self._ask.names)
        given = getattr(error, "value", None)
        if isinstance(given, ResponseFormat) and given != self._ask.params.response_format:  # made for tool calls
            told = ApiError(told.status, told.code, told.message.partition(", got ")[0], param=told.param)
        self.figures.reason, self.figures.refused = told.code, told.status < 500
        if told.code == "internal_error":
            logger.error("request %s failed", self._request_id, exc_info=error)
        answer = self._answer if self._ask.streams else None
        await self._outlet.fail(told, b"" if answer is None else answer.failing(told))

    # -- time -------------------------------------------------------------------------------------------------------

    async def tick(self, silent: float) -> float:
        """End the request if it waits too long, begin its stream once it runs, and ping a silent connection.

        Args:
            silent: Seconds since something was sent.

        Returns:
            Seconds after which this is to be called again.
        """
        settings = self._service.settings
        if self._permit is None or not self._permit.waiting:
            await self._outlet.ping(silent)
            return settings.ping_seconds / 2
        waited = time.monotonic() - self._began
        if not self._streams or any(stream.queued for stream in self._streams):
            left = settings.queue_timeout - waited
            if left <= 0:
                self.end(self._service.limits.waited_too_long())
            return min(1.0, max(left, 0.0) + 0.001)
        if self._ask.streams:  # a long prefill: the client sees that it is alive
            await self._outlet.start(self._opening)
            await self._outlet.ping(settings.ping_seconds)
        return settings.ping_seconds / 2
