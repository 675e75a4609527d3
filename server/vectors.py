"""`Vectors`: one request that computes without generating, from its parsed form to its end.

Each request ends once: with its answer, or with one error. This module never parses a body and knows no endpoint.
"""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import anyio
from starlette.types import Scope

from headrace.engine import Charge, Usage
from headrace.server.errors import ApiError, as_api_error, error_response
from headrace.server.http.connection import Connection, body
from headrace.server.http.gate import CALLER, REQUEST_ID
from headrace.server.limits import Permit
from headrace.server.observability.telemetry import EXCHANGE
from headrace.server.service import Service

__all__ = ["VectorAsk", "Vectors", "Worked"]

logger = logging.getLogger("headrace.server")

_TWICE = re.compile(r"(\w+)(\[\d+\]): \1((?:\[\d+\])?): ")


_LOOK = 0.25  # seconds between looks at whether a step has taken the request up
_TOGETHER = 64  # parts of an answer that are sent at once
_CHARACTERS = 4  # characters of a token, until the tokens are known


class Worked(NamedTuple):
    """The result of a request."""

    parts: list[bytes]
    """Parts of the answer's body as JSON; each is released once it is sent."""
    usage: Usage


@dataclass(frozen=True, slots=True, kw_only=True)
class VectorAsk:
    """A request for vectors or scores in the engine's terms, the same for every endpoint."""

    texts: Sequence[str | list[int]]
    """Texts to compute, as text or token ids."""
    adapter: str | None
    priority: int
    work: Callable[[str, anyio.Event, Charge], Awaitable[Worked]]
    """Function that computes the answer for a tenant, sets the event at the first step, and charges tokenised text."""
    size: int = 0
    """Largest number of bytes of the answer, with the numbers in it."""
    names: Mapping[str, str] = field(default_factory=dict)
    """Engine's name of a field -> the name that the client used, where they differ."""
    several: bool = True
    """Whether the inputs came in a list, so that a refusal of one names its place there."""


class Vectors:
    """The course of one request until it is answered."""

    def __init__(
        self, service: Service, ask: VectorAsk, connection: Connection, scope: Scope, timeout: float | None
    ) -> None:
        """Prepare to answer `ask` over `connection` in `timeout` seconds, at most the server's `request_timeout`."""
        longest = service.settings.request_timeout
        self._service, self._ask, self._connection, self._http = service, ask, connection, scope
        self._timeout = longest if timeout is None else min(timeout, longest)
        self._scope = anyio.CancelScope()
        self._permit: Permit | None = None
        self._started = anyio.Event()
        self._began = time.monotonic()
        self._ended_by: ApiError | None = None
        self._figures = service.telemetry.begin(scope[REQUEST_ID], scope[CALLER].name, ask.adapter or "")
        scope[EXCHANGE].figures = self._figures

    def end(self, error: ApiError) -> None:
        """End the request now and tell the client `error`."""
        if self._ended_by is None:
            self._ended_by = error
        self._scope.cancel()

    async def tick(self, silent: float) -> float:
        """End the request if it waits too long; return the seconds after which this is to be called again."""
        permit, settings = self._permit, self._service.settings
        if permit is not None and permit.waiting and self._started.is_set():
            permit.started()
        if permit is None or not permit.waiting:
            return settings.stall_timeout
        left = settings.queue_timeout - (time.monotonic() - self._began)
        if left <= 0:
            self.end(self._service.limits.waited_too_long())
        return min(_LOOK, max(left, 0.0) + 0.001)

    async def answer(self) -> None:
        """Answer the request: return when the last byte was sent, and raise nothing."""
        service, figures, caller = self._service, self._figures, self._http[CALLER]
        try:
            service.check_accepting()  # the drain may have begun while the body was read
            with service.limits.answer(caller, self._held()):
                self._permit = service.limits.admit(caller, 1, self._ask.priority)
                service.running.add(self)
                self._scope.deadline = anyio.current_time() + self._timeout
                parts: list[bytes] = []
                with self._scope:
                    parts = await self._work(self._permit)
                if self._scope.cancelled_caught:
                    raise self._ended_by or ApiError(503, "deadline_exceeded", "the request took longer than it may")
                await self._send_parts(parts)
            figures.reason = "finished"
        except Exception as error:
            await self._fail(error)
        finally:
            service.running.discard(self)
            if self._permit is not None:
                self._permit.end(refund=not self._started.is_set())  # nothing was computed
            figures.reason = figures.reason or self._connection.lost
            service.telemetry.end(figures, [], admitted=self._permit is not None)

    def _held(self) -> int:
        """Return the bytes that the request holds at most: its texts, or ids, and its answer."""
        return self._ask.size + sum(len(text) * (4 if isinstance(text, str) else 36) for text in self._ask.texts)

    async def _work(self, permit: Permit) -> list[bytes]:
        """Compute the answer; charge the key with an estimate of its tokens before, and with their number after."""
        most = self._service.engine.info.max_context
        tokens = sum(min(_tokens(text), most) for text in self._ask.texts)
        permit.add_prompt(tokens)
        parts, usage = await self._ask.work(self._http[CALLER].name, self._started, permit.made_tokens)
        permit.charge_prompt(usage.prompt_tokens)
        permit.started()
        self._figures.computed(usage)
        return parts

    async def _send_parts(self, parts: list[bytes]) -> None:
        headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % sum(map(len, parts)))]
        await self._connection.send({"type": "http.response.start", "status": 200, "headers": headers})
        parts.reverse()
        while parts:
            together = b"".join([parts.pop() for _ in range(min(_TOGETHER, len(parts)))])
            await self._connection.send(body(together, more=bool(parts)))

    async def _fail(self, error: Exception) -> None:
        told = self._told(error)
        self._figures.reason, self._figures.refused = told.code, told.status < 500
        if told.code == "internal_error":
            logger.error("request %s failed", self._http[REQUEST_ID], exc_info=error)
        response = error_response(told, self._http)
        start = {"type": "http.response.start", "status": response.status_code, "headers": response.raw_headers}
        await self._connection.send(start, body(bytes(response.body), more=False))

    def _told(self, error: Exception) -> ApiError:
        """Return the error for the client; `input[1]: input: ...` becomes `input[1]: ...`, in the field too."""
        told = as_api_error(error, self._ask.names).renamed(self._ask.names)
        found = _TWICE.match(told.detail)
        if found is None:
            return told
        param = found[1] + (found[2] if self._ask.several else "") + found[3]
        return told.at(param, f"{param}: {told.detail[found.end() :]}")


def _tokens(text: str | list[int]) -> int:
    """Return the estimated number of tokens of a text, or the number of ids."""
    return -(-len(text) // _CHARACTERS) if isinstance(text, str) else len(text)
