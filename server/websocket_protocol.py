"""`BoundedWebSocket`: uvicorn's WebSocket protocol with the bounds that it lacks; never sees what a frame says.

uvicorn pauses reading behind each message, but control frames get past that. What is added: a client that does not read
is not read either, it is cut off in time, and so is a connection that has ended but does not empty.
"""

from __future__ import annotations

from typing import Any

from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol

__all__ = ["BoundedWebSocket"]

_MAX_PARTS = 1024  # of a message: empty ones count against no limit of bytes


class BoundedWebSocket(WebSocketsSansIOProtocol):
    """One connection, after its head."""

    def __init__(self, *args: Any, stall_timeout: float, **kwargs: Any) -> None:
        """Take uvicorn's arguments, and the seconds for which a full buffer may be left unread."""
        super().__init__(*args, **kwargs)
        self._stall_timeout = stall_timeout
        self._stall_timer: Any = None
        self._ended = False

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop the clock."""
        self._stop_timer()
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        """The client reads too slowly: what it sends waits, and the buffer must drain in time."""
        super().pause_writing()
        self._start_timer()
        if not self.read_paused and not self.transport.is_closing():
            self.read_paused = True
            self.transport.pause_reading()

    def resume_writing(self) -> None:
        """The client has read."""
        super().resume_writing()
        if not self._ended:
            self._stop_timer()
            self._read_on()

    async def receive(self) -> Any:
        """The next message; more is read once all were taken and the client reads."""
        message = await self.queue.get()
        self._read_on()
        return message

    def handle_cont(self, event: Any) -> None:
        """Take a further part of a message."""
        if len(self.frames) >= _MAX_PARTS:
            self.transport.abort()
        else:
            super().handle_cont(event)

    def on_task_complete(self, task: Any) -> None:
        """The application has ended: what is left to send must leave in time."""
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
