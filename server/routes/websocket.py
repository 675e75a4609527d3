"""WebSocket /v1/chat/completions: many chats on one socket, each with its id; owns the socket, never reads a stream.

Frames are JSON objects. From the client:

    {"type": "request", "id": "a", "request": {...a chat completion...}, "credit": 64}
    {"type": "credit", "id": "a", "tokens": 64}
    {"type": "cancel", "id": "a"}

To the client, always with the request's id: `chunk` with a chat.completion.chunk as `data`, `completion` with a whole
answer where the request does not stream, then `done`; or `error` with OpenAI's error object, which is the end as well.
A request with `credit` sends while it has some: each chunk uses up one for each of its tokens, and has no more tokens
than there is credit. Without credit the tokens stay with the engine, which stops computing when its reader's window is
full. An id may be used again after its end; at most 64 requests run at once. A frame that breaks these rules closes the
socket with 4001, and a draining server closes it with 1012.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import anyio
import anyio.lowlevel
import orjson
from anyio.abc import TaskGroup
from starlette.types import Receive, Scope, Send
from starlette.websockets import WebSocket, WebSocketDisconnect

from headrace.server.answering import Answering
from headrace.server.errors import ApiError, as_api_error, error_body
from headrace.server.http.body import nests_deeper
from headrace.server.http.gate import CALLER, REQUEST_ID, SUBPROTOCOL
from headrace.server.routes.generation import ask_chat
from headrace.server.service import Service

__all__ = ["ChatSocketRoute"]

_PROTOCOL_ERROR, _UNSUPPORTED, _RESTART, _SLOW = 4001, 1003, 1012, 4008
_MAX_ID = 128
_MAX_REQUESTS = 64
_MAX_CREDIT = 2**31


class ChatSocketRoute:
    """The endpoint, as an ASGI application."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one socket."""
        service: Service = scope["app"].state.service
        socket = _ChatSocket(service, WebSocket(scope, receive, send))
        await socket.run()


class _Broken(Exception):
    """The client broke the protocol; the message is the reason of the close."""


class _ChatSocket:
    """One socket and the requests on it."""

    def __init__(self, service: Service, socket: WebSocket) -> None:
        self._service = service
        self._socket = socket
        self._outlets: dict[str, _Outlet] = {}
        self._sending = anyio.Lock()
        self._tasks: TaskGroup = anyio.create_task_group()
        self._emptied = anyio.Event()
        self._close: tuple[int, str] | None = None

    async def run(self) -> None:
        """Serve until the client goes away, breaks the protocol, or the server drains."""
        offered = self._socket.scope.get("subprotocols") or ()
        await self._socket.accept(SUBPROTOCOL if SUBPROTOCOL in offered else None)
        self._service.sockets.add(self)
        try:
            async with self._tasks:
                if self._service.draining:
                    self.drain()
                await self._receive()
                self._tasks.cancel_scope.cancel()
        finally:
            self._service.sockets.discard(self)
        if self._close is not None:
            code, reason = self._close
            with anyio.move_on_after(1.0), suppress(WebSocketDisconnect):
                await self._socket.close(code, reason)

    def drain(self) -> None:
        """Close the socket once nothing runs on it."""
        self._tasks.start_soon(self._close_when_empty)

    async def _close_when_empty(self) -> None:
        while self._outlets:
            self._emptied = anyio.Event()
            await self._emptied.wait()
        self.stop(_RESTART, "the server is shutting down")

    def stop(self, code: int, reason: str) -> None:
        """End every request and close the socket."""
        self._close = code, reason
        self._tasks.cancel_scope.cancel()

    async def _receive(self) -> None:
        while True:
            message = await self._socket.receive()
            if message["type"] == "websocket.disconnect":
                return
            text = message.get("text")
            if text is None:
                self._close = _UNSUPPORTED, "frames are text"
                return
            try:
                self._take(text)
            except _Broken as broken:
                self._close = _PROTOCOL_ERROR, str(broken)
                return

    def _take(self, text: str) -> None:
        """Act on a frame of the client."""
        try:
            frame = orjson.loads(text)
        except orjson.JSONDecodeError:
            raise _Broken("a frame is not JSON") from None
        if not isinstance(frame, dict):
            raise _Broken("a frame is not a JSON object")
        identity = frame.get("id")
        if not isinstance(identity, str) or not 0 < len(identity) <= _MAX_ID:
            raise _Broken(f"a frame needs an id of 1 to {_MAX_ID} characters")
        kind = frame.get("type")
        outlet = self._outlets.get(identity)
        if kind == "request":
            self._start(identity, frame)
        elif kind == "cancel":
            if outlet is not None and not outlet.ended:
                outlet.lost = "cancelled"
                outlet.scope.cancel()
        elif kind == "credit":
            tokens = _credit(frame.get("tokens"))
            if outlet is not None:
                outlet.grant(tokens)
        else:
            raise _Broken("a frame's type is request, credit or cancel")

    def _start(self, identity: str, frame: dict[str, Any]) -> None:
        credit = None if frame.get("credit") is None else _credit(frame["credit"])
        if identity in self._outlets:
            raise _Broken("a request with this id has not ended")
        if len(self._outlets) >= _MAX_REQUESTS:
            raise _Broken(f"a socket may have {_MAX_REQUESTS} requests at once")
        self._outlets[identity] = outlet = _Outlet(identity, credit, self._send)
        self._tasks.start_soon(self._answer, outlet, frame.get("request"))

    async def _answer(self, outlet: _Outlet, body: object) -> None:
        try:
            with outlet.scope:
                await self._generate(outlet, body)
            if outlet.scope.cancelled_caught:
                await outlet.fail(ApiError(400, "cancelled", "the request was cancelled"))
        finally:
            del self._outlets[outlet.identity]
            self._emptied.set()

    async def _generate(self, outlet: _Outlet, body: object) -> None:
        scope = self._socket.scope
        try:
            if not isinstance(body, dict):
                raise ApiError(400, "invalid_type", "request: must be a JSON object", param="request")
            most = self._service.settings.max_nesting
            if nests_deeper(body, most):
                raise ApiError(400, "invalid_json", f"request: nests deeper than {most}", param="request")
            ask = ask_chat(self._service, body)
        except Exception as error:
            await outlet.fail(as_api_error(error))
            return
        request_id = f"{scope[REQUEST_ID]}.{secrets.token_hex(4)}"
        answering = Answering(self._service, ask, outlet, scope[CALLER], request_id)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(_tick, answering)
            try:
                await answering.answer()
            finally:
                self._service.telemetry.chat_ended(answering.figures, scope)
            tasks.cancel_scope.cancel()

    async def _send(self, text: bytes) -> None:
        with anyio.move_on_after(self._service.settings.stall_timeout) as limit:
            async with self._sending:
                try:
                    await self._socket.send_text(text.decode())
                except WebSocketDisconnect:
                    self._tasks.cancel_scope.cancel()
        if limit.cancelled_caught:
            for outlet in self._outlets.values():
                outlet.lost = "slow_consumer"
            self.stop(_SLOW, "frames were left unread")


async def _tick(answering: Answering) -> None:
    pause = 0.5
    while True:
        await anyio.sleep(pause)
        pause = await answering.tick(0.0)


def _credit(value: object) -> int:
    if type(value) is not int or not 0 <= value <= _MAX_CREDIT:
        raise _Broken(f"credit is a number of tokens from 0 to {_MAX_CREDIT}")
    return value


class _Outlet:
    """The outlet of one request: sends chunks as frames with the request's id, while it has credit."""

    def __init__(self, identity: str, credit: int | None, send: Callable[[bytes], Any]) -> None:
        self.identity = identity
        self.started = False
        self.lost = "disconnected"
        self.ended = False
        """Whether the last frame has been sent or is about to be, so that nothing may follow it."""
        self.scope = anyio.CancelScope()
        self._id = orjson.dumps(identity)
        self._credit = credit
        self._granted = anyio.Event()
        self._send = send

    def grant(self, tokens: int) -> None:
        """Allow `tokens` more tokens."""
        if self._credit is not None:
            self._credit = min(self._credit + tokens, _MAX_CREDIT)
            self._granted.set()

    async def start(self, opening: bytes) -> None:
        """Send the first chunks, which have no tokens."""
        if not self.started:
            self.started = True
            await self._chunks(opening)

    async def room(self, tokens: int) -> int:
        """Wait for credit, and return the number of tokens, at most `tokens`, that it allows."""
        while self._credit is not None and self._credit <= 0:
            self._granted = anyio.Event()
            await self._granted.wait()
        return tokens if self._credit is None else min(tokens, self._credit)

    async def push(self, frames: bytes, tokens: int) -> None:
        """Send chunks, which use up credit."""
        if self._credit is not None:
            self._credit -= tokens
        await self._chunks(frames)

    async def finish(self, frames: bytes) -> None:
        """Send the last chunks and a `done` frame."""
        await self._chunks(frames)
        await self._end(b"done")

    async def whole(self, answer: bytes) -> None:
        """Send a whole answer and a `done` frame."""
        await self._frame(b"completion", b',"data":' + answer)
        await self._end(b"done")

    async def fail(self, error: ApiError, frames: bytes = b"") -> None:
        """Send the error as a frame of its own, unless the end has been sent."""
        if not self.ended:
            await self._end(b"error", b"," + orjson.dumps(error_body(error))[1:-1])

    async def ping(self, silent: float) -> None:
        """Do nothing: the socket has pings of its own."""

    async def _chunks(self, events: bytes) -> None:
        """Send server-sent events as frames."""
        for event in events.split(b"\n\n")[:-1]:
            await self._frame(b"chunk", b',"data":' + event.removeprefix(b"data: "))

    async def _end(self, kind: bytes, rest: bytes = b"") -> None:
        await anyio.lowlevel.checkpoint_if_cancelled()  # a cancel before the end is reported as the end
        self.ended = True
        await self._frame(kind, rest)

    async def _frame(self, kind: bytes, rest: bytes = b"") -> None:
        await self._send(b'{"type":"' + kind + b'","id":' + self._id + rest + b"}")
