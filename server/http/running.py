"""Runs an application on uvicorn until it is told to stop, and then lets what runs end; never opens an engine.

draining.py says what that end consists of.
"""

from __future__ import annotations

import gc
import resource
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from socket import socket
from types import FrameType
from typing import Any

import anyio
import uvicorn
from starlette.applications import Starlette

from headrace.engine import InvalidParams
from headrace.server.draining import Drain
from headrace.server.http.h11_protocol import BoundedH11
from headrace.server.http.websocket_protocol import BoundedWebSocket
from headrace.server.service import Service

__all__ = ["DrainingServer", "make_server", "most_connections", "settle_memory"]

_HEADER_TIMEOUT = 10.0
_SPARE_FILES = 128  # file descriptors that are left to everything but connections
_LEAST_CONNECTIONS = 32
_FLUSH = 0.1  # seconds in which bytes leave for a client that reads
_FLUSHED = 5.0  # seconds in which clients should have read their answers, once none runs any more
_CANCELLED = 10  # seconds after which tasks are cancelled that outlive their connections


_GARBAGE = 50_000  # new objects that start a collection; the default of 700 would start hundreds a second


class DrainingServer(uvicorn.Server):
    """A uvicorn server that drains at the first SIGTERM, SIGINT or SIGHUP, and stops at once at the second.

    While it drains it keeps listening, so that new requests get an answer that says when to come again.
    """

    def __init__(self, config: uvicorn.Config, app: Starlette) -> None:
        """Serve the application of `config`.

        Args:
            config: Configuration of any application.
            app: Application of `create_app` whose requests may end first: that of `config`, or one mounted in it.
        """
        super().__init__(config)
        self._drain = Drain(app)
        self._signals = 0

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Count a signal; the event loop acts on it soon, since this may run between any two of its instructions."""
        self._signals += 1

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Handle SIGHUP as well, which ends a terminal's session, unless the process was started with it ignored."""
        hang_up = signal.SIGHUP
        if threading.current_thread() is not threading.main_thread() or signal.getsignal(hang_up) is signal.SIG_IGN:
            with super().capture_signals():
                yield
            return
        before = signal.signal(hang_up, self.handle_exit)
        try:
            with super().capture_signals():
                yield
        finally:
            signal.signal(hang_up, before)

    async def on_tick(self, counter: int) -> bool:
        """Begin to drain where a signal came, and see whether the drain is over."""
        if self._signals > 1:
            self._drain.hurry()
        if self._signals and self._drain.advance(time.monotonic()):
            self.should_exit = True
        return await super().on_tick(counter)

    async def shutdown(self, sockets: list[socket] | None = None) -> None:
        """Close all connections, and cut those whose clients do not read their last bytes in time.

        An answer on a connection that was cut sees its client gone, and ends as it does then.
        """
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._cut_in_time)
            await super().shutdown(sockets)
            tasks.cancel_scope.cancel()

    async def _cut_in_time(self) -> None:
        end = time.monotonic() + (0.0 if self._drain.is_late else _FLUSHED)
        await anyio.sleep(_FLUSH)
        while time.monotonic() < end and self._signals < 2:  # noqa: ASYNC110 - a signal may set no event
            await anyio.sleep(0.05)
        for connection in list(self.server_state.connections):
            connection.transport.abort()


def make_server(app: Starlette, *, host: str, port: int, log_level: str = "info", **more: Any) -> DrainingServer:
    """Return a server for an application of `create_app`; `more` goes to `uvicorn.Config`.

    Raises:
        InvalidParams: The system allows this process too few open files.
    """
    service: Service = app.state.service
    stall_timeout = service.settings.stall_timeout + 1.0  # the application ends a request more gently before
    protocol: Any = partial(
        BoundedH11,
        header_timeout=_HEADER_TIMEOUT,
        stall_timeout=stall_timeout,
        max_connections=most_connections(),
    )
    sockets: Any = partial(BoundedWebSocket, stall_timeout=stall_timeout)
    config = uvicorn.Config(
        app,
        host=host,
        port=port,
        http=protocol,
        ws=sockets,
        ws_max_size=min(service.settings.max_body_bytes, 2**20),
        ws_per_message_deflate=False,
        timeout_graceful_shutdown=_CANCELLED,
        access_log=False,
        proxy_headers=False,
        server_header=False,
        log_level=log_level,
        **more,
    )
    return DrainingServer(config, app)


def settle_memory() -> None:
    """Exempt what has been loaded so far from garbage collection, and collect the rest less often.

    Call it in processes that are servers and nothing else: collections hold the event loop for tens of milliseconds.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(_GARBAGE, 20, 20)


def most_connections() -> int:
    """Return how many connections the system allows; the soft limit of open files is raised to the hard one.

    Raises:
        InvalidParams: The connections are too few to serve anybody; the error names the number of open files to allow.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard and hard != resource.RLIM_INFINITY:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        soft = hard
    if soft == resource.RLIM_INFINITY:
        return sys.maxsize
    least = _SPARE_FILES + _LEAST_CONNECTIONS
    if soft < least:
        raise InvalidParams(
            f"open files: at least {least} are needed to serve {_LEAST_CONNECTIONS} connections, and this process may "
            f"have {soft}: set `ulimit -n {least}` or more (one for each connection, and {_SPARE_FILES})",
            field="open files",
            value=soft,
            limit={"ge": least},
        )
    return soft - _SPARE_FILES
