"""`BoundedWebSocket`: uvicorn's WebSocket protocol with the bounds that it lacks; never sees what a frame says.

uvicorn pauses reading behind each message, but control frames get past that. This module stops reading from a client
that does not read, cuts it off in time, and cuts off a connection that has ended but does not empty. A connection that
fails ends with a close frame that its client gets to see: bytes that the client still sends are thrown away meanwhile,
since closing a TCP connection with bytes unread resets it. A client's mistake is no error in the log.
"""

from __future__ import annotations

from http import HTTPStatus
from typing import Any

from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol

__all__ = ["BoundedWebSocket"]

_MAX_PARTS = 1024  # parts of a message: empty ones count against no limit of bytes
_SLICE = 16_384  # bytes that are parsed at a time: thousands of empty parts, of which most come too late
_LINGER = 2.0  # seconds in which the client of a connection that failed should close it
_TOO_BIG, _NOT_UTF8 = 1009, 1007


class BoundedWebSocket(WebSocketsSansIOProtocol):
    """One WebSocket connection, after its head, with deadlines."""

    def __init__(self, *args: Any, stall_timeout: float, **kwargs: Any) -> None:
        """Take uvicorn's arguments, and the seconds for which a full buffer may be left unread."""
        super().__init__(*args, **kwargs)
        self._stall_timeout = stall_timeout
        self._stall_timer: Any = None
        self._ended = False
        self._failed = False

    def data_received(self, data: bytes) -> None:
        """Parse `data`, unless the connection has failed; the first is the head, which BoundedH11 parsed before."""
        for start in range(0, len(data), _SLICE):
            if self._failed:
                return
            super().data_received(data[start : start + _SLICE])
        if not self.handshake_initiated and not self.transport.is_closing():  # the head is not one of a WebSocket
            answer = b"".join(self.conn.data_to_send())
            reason = "Failed to open a WebSocket connection: its request may have no body and at most 128 headers.\n"
            self.transport.write(answer or self.conn.reject(HTTPStatus.BAD_REQUEST, reason).serialize())
            self.transport.close()

    async def send(self, message: Any) -> None:
        """Send `message`, and count the handshake as complete after an answer that refuses it."""
        await super().send(message)
        if message["type"] == "websocket.http.response.body" and not message.get("more_body", False):
            self.handshake_complete = True

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop the clock."""
        self._stop_timer()
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        """Stop reading from a client that reads too slowly, and start the clock in which the buffer must drain."""
        super().pause_writing()
        self._start_timer()
        if not self.read_paused and not self.transport.is_closing():
            self.read_paused = True
            self.transport.pause_reading()

    def resume_writing(self) -> None:
        """Stop the clock and read on, since the client has read."""
        super().resume_writing()
        if not self._ended:
            self._stop_timer()
            self._read_on()

    async def receive(self) -> Any:
        """Return the next message; read more once all messages were taken and the client reads."""
        message = await self.queue.get()
        self._read_on()
        return message

    def handle_cont(self, event: Any) -> None:
        """Add a further part of a message; fail a connection whose message has too many parts."""
        if self._failed:
            return
        if len(self.frames) >= _MAX_PARTS:
            self.conn.fail(_TOO_BIG, f"a message may have {_MAX_PARTS} parts")
            self.handle_parser_exception()
        else:
            super().handle_cont(event)

    def send_receive_event_to_app(self) -> None:
        """Hand a message to the application; fail a connection whose text is not UTF-8."""
        if self.curr_msg_data_type == "text":
            self.frames = [b"".join(self.frames)]
            try:
                self.frames[0].decode()
            except UnicodeDecodeError:
                self.conn.fail(_NOT_UTF8, "text must be UTF-8")
                self.handle_parser_exception()
                return
        super().send_receive_event_to_app()

    def handle_parser_exception(self) -> None:
        """Send the close frame that says how the connection failed, and then read nothing but its end."""
        if self._failed or self.transport.is_closing():
            return
        self._failed = self.close_sent = True
        self.frames = []
        sent = self.conn.close_sent
        code, reason = (1006, "") if sent is None else (sent.code, sent.reason)
        self.queue.put_nowait({"type": "websocket.disconnect", "code": code, "reason": reason})
        self.transport.write(b"".join(self.conn.data_to_send()))
        if self.transport.can_write_eof():
            self.transport.write_eof()
        if self.read_paused:
            self.read_paused = False
            self.transport.resume_reading()
        if self.close_timer is None:
            self.close_timer = self.loop.call_later(_LINGER, self.transport.close)

    def on_task_complete(self, task: Any) -> None:
        """Start the clock in which the rest must be sent, since the application has ended."""
        super().on_task_complete(task)
        self._ended = True
        if not self.disconnected:
            self._start_timer()

    def _read_on(self) -> None:
        if self.read_paused and self.queue.empty() and self.writable.is_set() and not self.transport.is_closing():
            self.read_paused = False
            self.transport.resume_reading()

    def _start_timer(self) -> None:
        if self._stall_timer is None:
            self._stall_timer = self.loop.call_later(self._stall_timeout, self.transport.abort)

    def _stop_timer(self) -> None:
        if self._stall_timer is not None:
            self._stall_timer.cancel()
            self._stall_timer = None
