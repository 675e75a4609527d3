"""`Answering`: one generation request from its parsed form to its last byte; the only place where streams are read.

Each request ends once, in one of three ways: its answer, an error body if nothing has been sent, or an error event. A
client that goes away cancels it. Never parses a body and never knows an endpoint.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Any

import anyio
from starlette.types import Receive, Scope, Send

from headrace.engine import Prompt, SamplingParams, TokenStream, Usage
from headrace.server.auth import Caller
from headrace.server.connection import Connection, body
from headrace.server.errors import ApiError, as_api_error, error_event, error_response
from headrace.server.gate import CALLER, REQUEST_ID
from headrace.server.limits import Permit
from headrace.server.protocol.answers import Answer, add_usage, pieces
from headrace.server.service import Service
from headrace.server.sse import DONE, TokenEvents

__all__ = ["Answering", "Ask"]

logger = logging.getLogger("headrace.server")


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """What a request wants, whatever its endpoint."""

    prompts: list[Prompt]
    params: SamplingParams
    """Of each prompt."""
    tools: list[dict[str, Any]] | None = None
    limit: int | None = None
    """`max_tokens` as the client named it: a prompt that does not leave room for it is refused."""
    cache_salt: str | None = None
    priority: int = 0
    streams: bool = False
    make_answer: Callable[[list[list[int]]], Answer]
    """Makes the answer, given the prompts as token ids."""


class Answering:
    """One request that is being answered."""

    def __init__(self, service: Service, ask: Ask, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer `ask` over an ASGI connection whose body has been read."""
        settings = service.settings
        self._service = service
        self._ask = ask
        self._scope = scope
        self._caller: Caller = scope[CALLER]
        self._connection = Connection(receive, send, stall_timeout=settings.stall_timeout)
        self._events = TokenEvents(self._connection, ping_seconds=settings.ping_seconds)
        self._streams: list[TokenStream] = []
        self._opening = b""
        self._began = time.monotonic()
        self._ended_by: ApiError | None = None
        self._permit: Permit | None = None

    async def run(self) -> None:
        """Answer; returns when the last byte was sent or the client has gone."""
        await self._connection.run(self._answer, self._tick)

    def end(self, error: ApiError) -> None:
        """End it now; the client is told `error`."""
        if self._ended_by is None:
            self._ended_by = error
        for stream in self._streams:
            stream.cancel()

    # -- its course -------------------------------------------------------------------------------------------------

    async def _answer(self) -> None:
        service, ask = self._service, self._ask
        try:
            service.check_accepting()
            self._permit = service.limits.admit(self._caller, len(ask.prompts) * ask.params.n)
            service.running.add(self)
            with anyio.move_on_after(self._timeout()) as limit:
                await self._generate(self._permit)
            if limit.cancelled_caught:
                raise ApiError(503, "deadline_exceeded", "the request took longer than it may")
        except Exception as error:
            await self._fail(error)
        finally:
            service.running.discard(self)
            if self._permit is not None:
                self._permit.end()

    async def _generate(self, permit: Permit) -> None:
        ask, engine = self._ask, self._service.engine
        prompts = [await engine.tokenize(prompt, tools=ask.tools) for prompt in ask.prompts]
        self._check_room(prompts)
        permit.add_prompt(sum(map(len, prompts)))
        answer = ask.make_answer(prompts)
        self._opening = answer.opening() if ask.streams else b""
        tenant = self._caller.name
        salt = None if ask.cache_salt is None else f"{tenant}\n{ask.cache_salt}"  # shared with oneself alone
        async with AsyncExitStack() as stack:
            for ids in prompts:
                stream = engine.stream(ids, ask.params, tenant=tenant, cache_salt=salt, priority=ask.priority)
                self._streams.append(await stack.enter_async_context(stream))
            for stream in self._streams:
                await stream.admitted()
            if self._ended_by is not None:  # while it was admitted
                raise self._ended_by
            await self._read_all(answer)
            usage = add_usage([stream.usage for stream in self._streams])
            if ask.streams:
                await self._events.start(self._opening)
                await self._events.finish(answer.closing(usage) + DONE)
            else:
                await self._send_whole(answer, usage)

    def _check_room(self, prompts: list[list[int]]) -> None:
        limit, most = self._ask.limit, self._service.engine.info.max_context
        for ids in prompts:
            if limit is not None and len(ids) < most < len(ids) + limit:
                message = f"the prompt's {len(ids)} tokens and max_tokens {limit} exceed the context of {most}"
                raise ApiError(400, "context_length_exceeded", message, param="max_tokens")

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
        ask, permit, pacer = self._ask, self._permit, self._service.pacer
        assert permit is not None
        while (chunk := await stream.next_chunk()) is not None:
            permit.started()
            permit.spend(len(chunk.tokens))
            frames = b""
            for piece in pieces(chunk, ask.params.n, first):
                if piece.finish_reason == "cancelled":
                    raise self._ended_by or self._service.shutting_down()
                if ask.streams:
                    frames += answer.feed(piece)
                else:
                    answer.keep(piece)
            if frames:
                if not self._events.started:
                    await self._events.start(self._opening)
                await self._events.push(frames)
                await pacer.turn()

    async def _send_whole(self, answer: Answer, usage: Usage) -> None:
        whole = answer.whole(usage)
        headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(whole))]
        start = {"type": "http.response.start", "status": 200, "headers": headers}
        await self._connection.send(start, body(whole, more=False))

    async def _fail(self, error: Exception) -> None:
        told = as_api_error(error)
        if told.code == "internal_error":
            logger.error("request %s failed", self._scope[REQUEST_ID], exc_info=error)
        if self._events.started:
            await self._events.finish(error_event(told))
        else:
            await error_response(told)(self._scope, _never, self._connection.send)

    # -- time -------------------------------------------------------------------------------------------------------

    def _timeout(self) -> float:
        longest = self._service.settings.request_timeout
        for name, value in self._scope["headers"]:
            if name == b"x-request-timeout":
                try:
                    asked = float(value)
                except ValueError:
                    asked = 0.0
                if not 0.0 < asked < float("inf"):
                    raise ApiError(400, "invalid_value", "X-Request-Timeout: must be seconds, above 0")
                longest = min(longest, asked)
        return longest

    async def _tick(self, silent: float) -> float:
        """End what waits too long, begin the answer of what has been taken up, and ping what is silent."""
        settings = self._service.settings
        if self._permit is None or not self._permit.waiting:
            await self._events.ping(silent)
            return settings.ping_seconds / 2
        waited = time.monotonic() - self._began
        if not self._streams or any(stream.queued for stream in self._streams):
            left = settings.queue_timeout - waited
            if left <= 0:
                pause = {"retry-after": f"{self._service.limits.retry_after():.0f}"}
                self.end(ApiError(503, "queue_timeout", "the request waited too long", headers=pause))
            return min(1.0, max(left, 0.0) + 0.001)
        if self._ask.streams:  # a long prefill: the client sees that it is alive
            await self._events.start(self._opening)
            await self._events.ping(settings.ping_seconds)
        return settings.ping_seconds / 2


async def _never() -> dict[str, Any]:
    raise RuntimeError("an error body is sent without reading anything")
