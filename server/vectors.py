"""`Vectors`: one request that computes without generating, from its parsed form to its end.

It ends once: with its answer, or with one error. Never parses a body and never knows an endpoint.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import anyio
from starlette.responses import Response
from starlette.types import Scope

from headrace.engine import Usage
from headrace.server.connection import Connection, body
from headrace.server.errors import ApiError, as_api_error, error_response
from headrace.server.gate import CALLER, REQUEST_ID
from headrace.server.limits import Permit
from headrace.server.observability.telemetry import EXCHANGE
from headrace.server.service import Service

__all__ = ["VectorAsk", "Vectors", "Worked"]

logger = logging.getLogger("headrace.server")

_TWICE = re.compile(r"(\w+)(\[\d+\]): \1((?:\[\d+\])?): ")


class Worked(NamedTuple):
    """What came of a request."""

    answer: bytes
    """Its body, JSON."""
    usage: Usage


@dataclass(frozen=True, slots=True, kw_only=True)
class VectorAsk:
    """What a request wants, whatever its endpoint."""

    texts: Sequence[str | list[int]]
    """All that is to be computed."""
    adapter: str | None
    priority: int
    work: Callable[[str], Awaitable[Worked]]
    """Computes it for a tenant."""
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
        self._ended_by: ApiError | None = None
        self._figures = service.telemetry.begin(scope[REQUEST_ID], scope[CALLER].name, ask.adapter or "")
        scope[EXCHANGE].figures = self._figures

    def end(self, error: ApiError) -> None:
        """End it now; the client is told `error`."""
        if self._ended_by is None:
            self._ended_by = error
        self._scope.cancel()

    async def tick(self, silent: float) -> float:
        """Nothing is sent before the answer; seconds after which this is to be called again."""
        return self._service.settings.stall_timeout

    async def answer(self) -> None:
        """Answer; returns when the last byte was sent, and raises nothing."""
        service, figures, permit, refund = self._service, self._figures, None, False
        try:
            service.check_accepting()  # it may have begun to drain while the body was read
            permit = service.limits.admit(self._http[CALLER], 1, self._ask.priority)
            service.running.add(self)
            self._scope.deadline = anyio.current_time() + self._timeout
            answer = b""
            with self._scope:
                answer = await self._work(permit)
            if self._scope.cancelled_caught:
                raise self._ended_by or ApiError(503, "deadline_exceeded", "the request took longer than it may")
            await self._send(Response(answer, media_type="application/json"))
            figures.reason = "finished"
        except Exception as error:
            told = await self._fail(error)
            refund = told.status < 500 and len(self._ask.texts) == 1  # of several, some may have been computed
        finally:
            service.running.discard(self)
            if permit is not None:
                permit.end(refund=refund)
            figures.reason = figures.reason or self._connection.lost
            service.telemetry.end(figures, [], admitted=permit is not None)

    async def _work(self, permit: Permit) -> bytes:
        """Charge the key with about as many tokens as there may be, and at the end with as many as there were."""
        most = self._service.engine.info.max_context
        charged = sum(min(len(text), most) for text in self._ask.texts)  # most tokens have a character or more
        permit.add_prompt(charged)
        answer, usage = await self._ask.work(self._http[CALLER].name)
        permit.spend(usage.prompt_tokens - charged)
        permit.started()
        self._figures.computed(usage)
        return answer

    async def _send(self, response: Response) -> None:
        start = {"type": "http.response.start", "status": response.status_code, "headers": response.raw_headers}
        await self._connection.send(start, body(bytes(response.body), more=False))

    async def _fail(self, error: Exception) -> ApiError:
        told = self._told(error)
        self._figures.reason, self._figures.refused = told.code, told.status < 500
        if told.code == "internal_error":
            logger.error("request %s failed", self._http[REQUEST_ID], exc_info=error)
        await self._send(error_response(told, self._http))
        return told

    def _told(self, error: Exception) -> ApiError:
        """What the client is told; of an input, `input[1]: input: ...` becomes `input[1]: ...`, in the field too."""
        told = as_api_error(error, self._ask.names).renamed(self._ask.names)
        found = _TWICE.match(told.message)
        if found is None:
            return told
        param = found[1] + (found[2] if self._ask.several else "") + found[3]
        message = f"{param}: {told.message[found.end() :]}"
        return ApiError(told.status, told.code, message, param=param, headers=told.headers)
