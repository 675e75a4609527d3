"""`Vectors`: one request that computes without generating, from its parsed form to its end.

It ends once: with its answer, or with one error. Never parses a body and never knows an endpoint.
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
_CHARACTERS = 4  # of a token, until the tokens are known


class Worked(NamedTuple):
    """What came of a request."""

    parts: list[bytes]
    """The answer's body, as JSON; each part is given up once it is sent."""
    usage: Usage


@dataclass(frozen=True, slots=True, kw_only=True)
class VectorAsk:
    """What a request wants, whatever its endpoint."""

    texts: Sequence[str | list[int]]
    """Texts, as text or token ids, that are to be computed."""
    adapter: str | None
    priority: int
    work: Callable[[str, anyio.Event, Charge], Awaitable[Worked]]
    """Computes it for a tenant; the event is set when a step takes it up, and the last is told what was tokenised."""
    size: int = 0
    """Bytes that its answer may have, with the numbers that it is made of."""
    names: Mapping[str, str] = field(default_factory=dict)
    """What the client called fields that the engine knows by other names."""
    several: bool = True
    """The inputs came in a list: a refusal of one names its place there."""


class Vectors:
    """One request that is being answered."""

    def __init__(
        self, service: Service, ask: VectorAsk, connection: Connection, scope: Scope, timeout: float | None
    ) -> None:
        """Answer `ask` over `connection`, in `timeout` seconds or what the server allows."""
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
        """End it now; the client is told `error`."""
        if self._ended_by is None:
            self._ended_by = error
        self._scope.cancel()

    async def tick(self, silent: float) -> float:
        """End it where it waits too long; seconds after which this is to be called again."""
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
        """Answer; returns when the last byte was sent, and raises nothing."""
        service, figures, caller = self._service, self._figures, self._http[CALLER]
        try:
            service.check_accepting()  # it may have begun to drain while the body was read
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
        """Bytes that it holds at most: its texts, or ids, and its answer."""
        return self._ask.size + sum(len(text) * (4 if isinstance(text, str) else 36) for text in self._ask.texts)

    async def _work(self, permit: Permit) -> list[bytes]:
        """Charge the key with about as many tokens as there will be, and at the end with as many as there were."""
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
        """What the client is told; of an input, `input[1]: input: ...` becomes `input[1]: ...`, in the field too."""
        told = as_api_error(error, self._ask.names).renamed(self._ask.names)
        found = _TWICE.match(told.detail)
        if found is None:
            return told
        param = found[1] + (found[2] if self._ask.several else "") + found[3]
        return told.at(param, f"{param}: {told.detail[found.end() :]}")


def _tokens(text: str | list[int]) -> int:
    """About as many as there are in a text."""
    return -(-len(text) // _CHARACTERS) if isinstance(text, str) else len(text)
