"""`TokenEvents`: server-sent events of one generation, pushed as ready bytes; the only place that knows sse-starlette.

sse-starlette's own path costs four tasks a stream and an encoding an event, and ends every stream as soon as the server
is told to stop. Here its response keeps headers, framing and ping, but the caller pushes frames, the connection's one
watcher pings, and the server's drain decides about the end. docs/serving.md has the measurement.
"""

from __future__ import annotations

from collections.abc import AsyncIterator

from sse_starlette import EventSourceResponse, ServerSentEvent

from headrace.server.connection import Connection, body

__all__ = ["DONE", "TokenEvents"]

DONE = b"data: [DONE]\n\n"
_PING = ServerSentEvent(comment="ping", sep="\n").encode()


class TokenEvents(EventSourceResponse):
    """Events that are pushed; `start` and `finish` frame them."""

    def __init__(self, connection: Connection, *, ping_seconds: float) -> None:
        """Send over `connection`; a stream that was silent for `ping_seconds` gets a comment."""
        super().__init__(_nothing(), ping=ping_seconds, sep="\n")
        self.started = False
        self._connection = connection

    async def start(self, opening: bytes) -> None:
        """Send status, headers and the first events; later calls do nothing."""
        if not self.started:
            self.started = True
            message = {"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers}
            await self._connection.send(message, body(opening or _PING, more=True))

    async def push(self, frames: bytes) -> None:
        """Send whole events."""
        await self._connection.send(body(frames, more=True))

    async def finish(self, frames: bytes) -> None:
        """Send the last events; nothing may follow."""
        self.active = False
        await self._connection.send(body(frames, more=False))

    async def ping(self, silent: float) -> None:
        """Send a comment if the stream was silent for long enough."""
        if self.started and self.active and silent >= self.ping_interval / 2:
            await self._connection.send(body(_PING, more=True))


async def _nothing() -> AsyncIterator[bytes]:
    return
    yield b""
