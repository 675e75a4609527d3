"""Runs an application on uvicorn until it is told to stop, and then lets what runs end; never opens an engine."""

from __future__ import annotations

import gc
import resource
import time
from functools import partial
from types import FrameType
from typing import Any

import uvicorn
from starlette.applications import Starlette

from headrace.server.http_protocol import BoundedH11
from headrace.server.service import Service
from headrace.server.websocket_protocol import BoundedWebSocket

__all__ = ["DrainingServer", "make_server", "settle_memory"]

_HEADER_TIMEOUT = 10.0
_SPARE_FILES = 128  # file descriptors that are left to everything but connections
_LAST_WORDS = 1.0  # seconds for the error events of what was ended


_GARBAGE = 50_000  # new objects that start a collection; the default of 700 would start hundreds a second


class DrainingServer(uvicorn.Server):
    """A uvicorn server that drains at the first signal, and stops at once at the second.

    While it drains it keeps listening, so that new requests get an answer that says when to come again.
    """

    def __init__(self, config: uvicorn.Config, service: Service) -> None:
        """Serve `config`, draining `service`."""
        super().__init__(config)
        self._service = service
        self._deadline: float | None = None
        self._ended_at: float | None = None

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Begin to drain; stop at the second signal."""
        if self._deadline is None:
            self._service.drain()
            self._deadline = time.monotonic() + self._service.settings.drain_seconds
        else:
            self.config.timeout_graceful_shutdown = 0
            self.should_exit = self.force_exit = True

    async def on_tick(self, counter: int) -> bool:
        """See whether the drain is over."""
        now = time.monotonic()
        if self._deadline is not None and not self.should_exit:
            if not self._service.running:
                self.should_exit = True
            elif self._ended_at is not None:
                self.should_exit = now >= self._ended_at + _LAST_WORDS
            elif now >= self._deadline:
                self._ended_at = now
                self._service.end_all()
        return await super().on_tick(counter)


def make_server(app: Starlette, *, host: str, port: int, log_level: str = "info", **more: Any) -> DrainingServer:
    """A server for an application of `create_app`; `more` goes to `uvicorn.Config`."""
    service: Service = app.state.service
    stall_timeout = service.settings.stall_timeout + 1.0  # the application ends a request more gently before
    protocol: Any = partial(
        BoundedH11,
        header_timeout=_HEADER_TIMEOUT,
        stall_timeout=stall_timeout,
        max_connections=_most_connections(),
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
        timeout_graceful_shutdown=5,
        access_log=False,
        proxy_headers=False,
        server_header=False,
        log_level=log_level,
        **more,
    )
    return DrainingServer(config, service)


def settle_memory() -> None:
    """Search what has been loaded until now no longer for garbage, and the rest less often.

    For processes that are servers and nothing else: collections hold the event loop for tens of milliseconds.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(_GARBAGE, 20, 20)


def _most_connections() -> int:
    """As many as the system allows this process; its soft limit is raised to the hard one."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard and hard != resource.RLIM_INFINITY:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        soft = hard
    return max(1, soft - _SPARE_FILES)
