"""`Connection`: one request's way back to its client; notices that the client has gone or stopped reading.

One task beside the answering one waits for the disconnect and ticks. The module never looks at what is sent.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable

import anyio
from starlette.types import Message, Receive, Send

__all__ = ["Connection", "body"]


def body(part: bytes, *, more: bool) -> Message:
    """Return the ASGI message for a part of a body."""
    return {"type": "http.response.body", "body": part, "more_body": more}


class Connection:
    """The way from one request back to its client; cancels the answer of a client that has gone."""

    def __init__(self, receive: Receive, send: Send, *, stall_timeout: float) -> None:
        """Watch one request, whose body has been read.

        Args:
            receive: `receive` of the ASGI server.
            send: `send` of the ASGI server.
            stall_timeout: Seconds after which a send that is stuck ends the request.
        """
        self.lost = "disconnected"
        """Reason why the answer was cut off, if it was: `disconnected`, or `slow_consumer` for a client given up."""
        self._receive = receive
        self._send = send
        self._stall_timeout = stall_timeout
        self._sending = False
        self._free: anyio.Event | None = None
        """Event for which a second sender waits; a lock would cost every event more than the events of most streams."""
        self._last = time.monotonic()

    async def run(self, answer: Callable[[], Awaitable[None]], tick: Callable[[float], Awaitable[float]]) -> None:
        """Run `answer`, which raises nothing, and cancel it if the client goes away.

        Args:
            answer: Function that answers the request through `send`.
            tick: Function called now and then with the seconds since the last send; returns after how many seconds to
                call it again.
        """
        async with anyio.create_task_group() as tasks:
            # Each event wakes the answer through every coroutine above it; in a task of its own those are the fewest.
            tasks.start_soon(self._run_to_end, answer, tasks.cancel_scope)
            await self._watch(tasks.cancel_scope, tick)

    async def _run_to_end(self, answer: Callable[[], Awaitable[None]], scope: anyio.CancelScope) -> None:
        await answer()
        scope.cancel()

    async def send(self, *messages: Message) -> None:
        """Send ASGI messages with nothing between them, waiting while the client is behind."""
        while self._sending:
            self._free = self._free or anyio.Event()
            await self._free.wait()
        self._sending = True
        self._last = time.monotonic()
        try:
            for message in messages:
                await self._send(message)
        finally:
            self._sending = False
            if self._free is not None:
                self._free.set()
                self._free = None

    async def _watch(self, scope: anyio.CancelScope, tick: Callable[[float], Awaitable[float]]) -> None:
        pause = 0.5
        while True:
            with anyio.move_on_after(min(pause, self._stall_timeout)):
                message = await self._receive()
                if message["type"] == "http.disconnect":
                    break
                continue
            silent = time.monotonic() - self._last
            if not self._sending:
                with anyio.move_on_after(self._stall_timeout) as stuck:  # the tick may send, too
                    pause = await tick(silent)
                if stuck.cancelled_caught:
                    self.lost = "slow_consumer"
                    break
            elif silent >= self._stall_timeout:
                self.lost = "slow_consumer"
                break
        scope.cancel()
