"""`TokenEvents`: server-sent events of one generation, pushed as ready bytes; the only place that knows sse-starlette.

sse-starlette's own path costs four tasks a stream and an encoding an event, and ends every stream as soon as the server
is told to stop. Here its response keeps headers, framing and ping, but the caller pushes frames, the connection's one
watcher pings, and the server's drain decides about the end. docs/serving.md has the measurement.
"""

from __future__ import annotations

from collections.abc import AsyncIterator

from sse_starlette import EventSourceResponse, ServerSentEvent

from headrace.server.connection import Connection, body
from headrace.server.errors import ApiError, error_event, error_response

__all__ = ["TokenEvents"]

_DONE = b"data: [DONE]\n\n"
_PING = ServerSentEvent(comment="ping", sep="\n").encode()


class TokenEvents(EventSourceResponse):
    """Events that are pushed; `start` and `finish` frame them."""

    def __init__(self, connection: Connection, *, ping_seconds: float) -> None:
        """Send over `connection`; a stream that was silent for `ping_seconds` gets a comment."""
        super().__init__(_nothing(), ping=ping_seconds, sep="\n")
        self.started = False
        self._connection = connection

    @property
    def lost(self) -> str:
        """Why the client can no longer be told anything, where that is so."""
        return self._connection.lost

    async def start(self, opening: bytes) -> None:
        """Send status, headers and the first events; later calls do nothing."""
        if not self.started:
            self.started = True
            message = {"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers}
            await self._connection.send(message, body(opening or _PING, more=True))

    async def push(self, frames: bytes, tokens: int) -> None:
        """Send whole events."""
        await self._connection.send(body(frames, more=True))

    async def finish(self, frames: bytes) -> None:
        """Send the last events of an answer that is complete."""
        await self._end(frames + _DONE)

    async def whole(self, answer: bytes) -> None:
        """Send an answer that was not to be streamed."""
        headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(answer))]
        start = {"type": "http.response.start", "status": 200, "headers": headers}
        await self._connection.send(start, body(answer, more=False))

    async def fail(self, error: ApiError) -> None:
        """Tell the client: by status if nothing has been sent, else by an event, after which nothing follows."""
        if self.started:
            await self._end(error_event(error))
        else:
            response = error_response(error)
            start = {"type": "http.response.start", "status": response.status_code, "headers": response.raw_headers}
            await self._connection.send(start, body(bytes(response.body), more=False))

    async def ping(self, silent: float) -> None:
        """Send a comment if the stream was silent for long enough."""
        if self.started and self.active and silent >= self.ping_interval / 2:
            await self._connection.send(body(_PING, more=True))

    async def _end(self, frames: bytes) -> None:
        self.active = False
        await self._connection.send(body(frames, more=False))


async def _nothing() -> AsyncIterator[bytes]:
    return
    yield b""
