"""`TokenEvents`: server-sent events of one generation, pushed as ready bytes; the only place that knows sse-starlette.

sse-starlette's own path costs four tasks a stream and an encoding an event, and ends every stream as soon as the server
is told to stop. Here its response keeps headers, framing and ping, but the caller pushes frames, the connection's one
watcher pings, and the server's drain decides about the end. docs/serving.md has the measurement.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from typing import Final, NamedTuple

from sse_starlette import EventSourceResponse, ServerSentEvent
from starlette.responses import Response

from headrace.server.errors import ApiError
from headrace.server.http.connection import Connection, body

__all__ = ["DATA", "MESSAGES", "TYPED", "Framing", "TokenEvents"]

_COMMENT = ServerSentEvent(comment="ping", sep="\n").encode()


class Framing(NamedTuple):
    """The parts of an endpoint's streams besides the events of their answer."""

    done: bytes
    """Bytes after the last event of an answer that is complete."""
    ping: bytes
    """Bytes for a silent stream."""


DATA: Final = Framing(b"data: [DONE]\n\n", _COMMENT)
"""Framing of chats and completions, whose events have no names."""
TYPED: Final = Framing(b"", _COMMENT)
"""Framing of responses, whose last event says that it is the last."""
MESSAGES: Final = Framing(b"", b'event: ping\ndata: {"type":"ping"}\n\n')
"""Framing of Anthropic's messages."""


class TokenEvents(EventSourceResponse):
    """A response of pushed events; `start` and `finish` frame them."""

    def __init__(
        self,
        connection: Connection,
        refuse: Callable[[ApiError], Response],
        *,
        framing: Framing = DATA,
        ping_seconds: float,
    ) -> None:
        """Send over `connection`.

        Args:
            connection: Connection to the client.
            refuse: Function that makes the response to a request that failed before anything was sent.
            framing: Framing of the endpoint.
            ping_seconds: Seconds of silence after which a stream gets a ping.
        """
        super().__init__(_nothing(), ping=ping_seconds, sep="\n")
        self.started = False
        self._connection = connection
        self._refuse = refuse
        self._framing = framing

    @property
    def lost(self) -> str:
        """Reason why the answer was cut off, where it was, such as `disconnected`."""
        return self._connection.lost

    async def start(self, opening: bytes) -> None:
        """Send status, headers and the first events; later calls do nothing."""
        if not self.started:
            self.started = True
            message = {"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers}
            await self._connection.send(message, body(opening or self._framing.ping, more=True))

    async def room(self, tokens: int) -> int:
        """Return `tokens`: a client that does not read holds up `push`, and needs no other bound."""
        return tokens

    async def push(self, frames: bytes, tokens: int) -> None:
        """Send whole events."""
        await self._connection.send(body(frames, more=True))

    async def finish(self, frames: bytes) -> None:
        """Send the last events of an answer that is complete."""
        await self._end(frames + self._framing.done)

    async def whole(self, answer: bytes) -> None:
        """Send a whole answer to a request that does not stream."""
        headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(answer))]
        start = {"type": "http.response.start", "status": 200, "headers": headers}
        await self._connection.send(start, body(answer, more=False))

    async def fail(self, error: ApiError, frames: bytes) -> None:
        """Tell the client of `error` by status if nothing has been sent, else by `frames`, which end the stream."""
        if self.started:
            await self._end(frames)
        else:
            response = self._refuse(error)
            start = {"type": "http.response.start", "status": response.status_code, "headers": response.raw_headers}
            await self._connection.send(start, body(bytes(response.body), more=False))

    async def ping(self, silent: float) -> None:
        """Send a ping if the stream was silent for half the ping interval; `silent` is in seconds."""
        if self.started and self.active and silent >= self.ping_interval / 2:
            await self._connection.send(body(self._framing.ping, more=True))

    async def _end(self, frames: bytes) -> None:
        self.active = False
        await self._connection.send(body(frames, more=False))


async def _nothing() -> AsyncIterator[bytes]:
    return
    yield b""
