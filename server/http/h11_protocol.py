"""`BoundedH11`: uvicorn's h11 protocol with the deadlines that it lacks; never sees what a request asks.

h11 itself refuses heads beyond its size and most malformed framing; strict.py refuses the rest. This module
adds deadlines for a head and for the rest of a body that nobody reads any more, cuts off a client that stops reading,
and writes a refusal of the protocol as JSON like every other, and not as an error of the server in its log.
"""

from __future__ import annotations

import logging
import socket
from typing import Any

import h11
import orjson
from uvicorn.protocols.http.h11_impl import H11Protocol

from headrace.server.errors import ApiError, error_body
from headrace.server.http.strict import Malformed, StrictConnection
from headrace.server.observability.logs import Line

__all__ = ["BoundedH11"]

logger = logging.getLogger("headrace.server.requests")

_MAX_HEAD = 65_536
_MIN_CHUNK = 64  # bytes that parts of a body have on average, beyond the first thousand
_FREE_CHUNKS = 1024
_MAX_UNREAD = 4 * 2**20  # bytes of a body that are thrown away after its answer
_SILENCE = 15.0  # seconds, beyond those that a client may leave unread, in which its host must acknowledge something
_PROBES = {"TCP_KEEPIDLE": 15, "TCP_KEEPINTVL": 10, "TCP_KEEPCNT": 3}  # keepalive, while nothing is sent


class _BoundedConnection(StrictConnection):
    """A connection that refuses a body in crumbs, since each costs as much as a packet, and frames answers itself."""

    _parts = 0
    _bytes = 0
    _chunked = False
    """Whether the head of a chunked answer has been sent, and not yet its end."""
    _method = b""
    """The method of the latest request."""

    @property
    def answers_head(self) -> bool:
        """Whether the next answer is that of a HEAD request, which has no body."""
        return self.our_state is h11.SEND_RESPONSE and self._method == b"HEAD"

    def send(self, event: Any) -> Any:
        """Return the bytes of an event; frame a part of a chunked answer right here, since it changes no state.

        This saves 5 µs for each streamed event.
        """
        if self._chunked and type(event) is h11.Data:
            data = event.data
            return b"%x\r\n%b\r\n" % (len(data), data) if data else b""
        sent = super().send(event)
        self._chunked = type(event) is h11.Response and b"\r\ntransfer-encoding: chunked\r\n" in sent.lower()
        return sent

    def check(self, event: Any) -> None:
        """Refuse what the base class refuses, and a body of too many small parts."""
        if isinstance(event, h11.Request):
            self._method = event.method
        super().check(event)
        if isinstance(event, h11.Data):
            self._parts += 1
            self._bytes += len(event.data)
            if self._parts > _FREE_CHUNKS + self._bytes // _MIN_CHUNK:
                raise Malformed("the body comes in too small chunks")
        elif isinstance(event, h11.Request):
            self._parts = self._bytes = 0


class BoundedH11(H11Protocol):
    """One HTTP/1.1 connection with deadlines."""

    def __init__(
        self, *args: Any, header_timeout: float, stall_timeout: float, max_connections: int, **kwargs: Any
    ) -> None:
        """Take uvicorn's arguments and the limits.

        Args:
            args: Arguments of uvicorn's protocol.
            header_timeout: Seconds in which a head must have arrived.
            stall_timeout: Seconds for which a full buffer may be left unread.
            max_connections: Connections at a time; more are closed as they come, before file descriptors run out.
            kwargs: Keyword arguments of uvicorn's protocol.
        """
        super().__init__(*args, **kwargs)
        self.conn: _BoundedConnection = _BoundedConnection(h11.SERVER, _MAX_HEAD)
        self._header_timeout = header_timeout
        self._stall_timeout = stall_timeout
        self._max_connections = max_connections
        self._head_timer: Any = None
        self._stall_timer: Any = None
        self._unread: int | None = None
        """Bytes thrown away of a body whose request has been answered; None where there is no such body."""

    def connection_made(self, transport: Any) -> None:
        """Begin to wait for a head; close a connection beyond the limit."""
        super().connection_made(transport)
        _notice_dead_host(transport.get_extra_info("socket"), self._stall_timeout + _SILENCE)
        if len(self.connections) > self._max_connections:
            transport.abort()
        else:
            self._expect_head()

    def data_received(self, data: bytes) -> None:
        """Parse `data`; run the clock while a head is incomplete."""
        super().data_received(data)
        if self._unread is not None and self.conn.their_state is h11.SEND_BODY:
            self._unread += len(data)
            if self._unread > _MAX_UNREAD:
                self.transport.abort()
            return
        self._unread = None
        if self.conn.their_state is not h11.IDLE:
            self._stop_head_timer()
        elif self._head_timer is None:
            self._expect_head()

    def on_response_complete(self) -> None:
        """Give the rest of the request's body, once the answer is sent, as long to come as a head."""
        super().on_response_complete()
        if self.transport.is_closing():
            self._start_stall_timer()
        elif self.conn.our_state is h11.DONE and self.conn.their_state is h11.SEND_BODY:
            self._unread = 0
            self._stop_head_timer()
            self._expect_head()

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop the clocks."""
        self._stop_head_timer()
        self._stop_stall_timer()
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        """Start the clock against a client that reads too slowly: the buffer must drain in time."""
        super().pause_writing()
        self._start_stall_timer()

    def resume_writing(self) -> None:
        """Stop the clock, since the client has read."""
        self._stop_stall_timer()
        super().resume_writing()
        if self.transport.is_closing():
            self._start_stall_timer()

    def timeout_keep_alive_handler(self) -> None:
        """Close when no further request came, once what is left of the answer has been read."""
        super().timeout_keep_alive_handler()
        self._start_stall_timer()

    def handle_events(self) -> None:
        """Act on the events that have come, and refuse what is not HTTP."""
        super().handle_events()
        if self.conn.refusal is not None and not self.transport.is_closing():
            self._refuse(self.conn.refusal)

    def _refuse(self, refusal: h11.RemoteProtocolError) -> None:
        """Answer 400 if no answer has begun; close the connection in any case."""
        reason = str(refusal) if isinstance(refusal, Malformed) else "this is not a valid HTTP/1.1 request"
        logger.info("%s", Line("malformed", {"status": 400, "reason": reason}))
        if self.cycle is not None:  # a request that still runs is cut off: it may send nothing more
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            self._send_400(reason)
        self.transport.close()
        self._start_stall_timer()

    def _unsupported_upgrade_warning(self) -> None:
        """Log no upgrade to a protocol other than WebSocket: clients offer HTTP/2 as a matter of course."""

    def _send_400(self, reason: str) -> None:
        body = orjson.dumps(error_body(ApiError(400, "invalid_http", reason)))
        headers = [
            (b"content-type", b"application/json"),
            (b"content-length", b"%d" % len(body)),
            (b"connection", b"close"),
        ]
        response = h11.Response(status_code=400, headers=headers, reason=b"Bad Request")
        content = () if self.conn.answers_head else (h11.Data(data=body),)
        for event in (response, *content, h11.EndOfMessage()):
            self.transport.write(self.conn.send(event) or b"")

    def _expect_head(self) -> None:
        self._head_timer = self.loop.call_later(self._header_timeout, self.transport.abort)

    def _stop_head_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _start_stall_timer(self) -> None:
        if self._stall_timer is None:
            self._stall_timer = self.loop.call_later(self._stall_timeout, self.transport.abort)

    def _stop_stall_timer(self) -> None:
        if self._stall_timer is not None:
            self._stall_timer.cancel()
            self._stall_timer = None


def _notice_dead_host(sock: Any, seconds: float) -> None:
    """Let the system end a connection whose other host has died silently, in about `seconds`."""
    if sock is None or sock.family not in (socket.AF_INET, socket.AF_INET6):
        return
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in {**_PROBES, "TCP_USER_TIMEOUT": int(1000 * seconds)}.items():
        if hasattr(socket, name):  # not every system has them all
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
