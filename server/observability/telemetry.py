"""`Telemetry`: counts and logs a server's requests as they begin and end, and does nothing else."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Sequence
from typing import Any

from starlette.routing import BaseRoute, Route, WebSocketRoute
from starlette.types import Scope

from headrace.engine import TokenStream
from headrace.server.observability.figures import Figures, between
from headrace.server.observability.logs import Line
from headrace.server.observability.recorder import OTHER, Recorder

__all__ = ["EXCHANGE", "PROBES", "Exchange", "Telemetry"]

logger = logging.getLogger("headrace.server.requests")

EXCHANGE = "headrace.exchange"
"""Key of the scope under which routes find the `Exchange`."""
PROBES = frozenset({"/health/live", "/health/ready", "/metrics"})
"""Routes that machines ask every few seconds; successes are logged at DEBUG, like those of the page's files."""

_METHODS = frozenset({"DELETE", "GET", "HEAD", "OPTIONS", "PATCH", "POST", "PUT"})
_GONE = 499
_MAX_TENANTS = 200


class Exchange:
    """One HTTP request or one WebSocket, from its head to its end."""

    __slots__ = ("began", "figures", "status")

    def __init__(self) -> None:
        """Begin now."""
        self.began = time.perf_counter()
        self.status = 0
        self.figures: Figures | None = None
        """Figures of the generation that answered the request; a route that generates puts them here."""


class Telemetry:
    """Counts and log lines of a server's requests. All methods run on the event loop's thread."""

    def __init__(self) -> None:
        """Start with nothing counted."""
        self.recorder = Recorder(_MAX_TENANTS)
        self._routes: dict[Any, str] = {}

    def name_routes(self, routes: Iterable[BaseRoute]) -> None:
        """Use the paths of `routes` as labels; other paths are `other`."""
        self._routes = {route.endpoint: route.path for route in routes if isinstance(route, Route | WebSocketRoute)}

    # -- generations ------------------------------------------------------------------------------------------------

    def begin(self, request_id: str, tenant: str, adapter: str = "") -> Figures:
        """Return the figures of a generation request that has come."""
        return Figures(self.recorder, request_id, tenant, adapter)

    def tokenized(self, figures: Figures) -> None:
        """Note that the prompts are token ids and wait for a step."""
        figures.queued = time.perf_counter()
        self.recorder.tokenize_time.add(figures.queued - figures.began)

    def end(self, figures: Figures, streams: Sequence[TokenStream], *, admitted: bool) -> None:
        """Count a generation request that has ended for the reason in `figures`; `admitted` if it was not refused."""
        recorder, now = self.recorder, time.perf_counter()
        figures.ended = now
        figures.take(streams)
        if figures.queued is not None and not figures.refused:  # a request that waited in vain counts as well
            until = figures.taken_up or figures.first or now
            recorder.queue_time.add(max(until - figures.queued, 0.0))
        if admitted:
            figures.account.requests += 1
        if figures.reason == "finished":
            self._finished(figures, now)
        elif admitted and not figures.refused:
            recorder.abort(figures.reason or OTHER)
        if figures.reason == "slow_consumer":
            fields = {"request_id": figures.request_id, "tenant": figures.tenant, **figures.shown()}
            logger.warning("%s", Line("slow_consumer", fields))

    def _finished(self, figures: Figures, now: float) -> None:
        recorder = self.recorder
        recorder.finished.update(figures.finish_reasons)
        recorder.request_latency.add(now - figures.began)
        recorder.prompt_tokens.add(figures.prompt_tokens)
        recorder.generation_tokens.add(figures.completion_tokens)
        if figures.first is not None:
            recorder.decode_time.add(now - figures.first)
            if figures.taken_up is not None:
                recorder.prefill_time.add(max(figures.first - figures.taken_up, 0.0))

    def chat_ended(self, figures: Figures, scope: Scope) -> None:
        """Log a chat of the WebSocket `scope`, which has no HTTP request of its own."""
        if logger.isEnabledFor(logging.INFO):
            route = self._routes.get(scope.get("endpoint"), OTHER)
            fields = {"request_id": figures.request_id, "tenant": figures.tenant, "method": "WEBSOCKET", "route": route}
            logger.info("%s", Line("request", fields | figures.shown()))

    # -- HTTP -------------------------------------------------------------------------------------------------------

    def exchanged(self, scope: Scope, exchange: Exchange, request_id: str, tenant: str | None) -> None:
        """Count and log an HTTP request or a WebSocket that has ended."""
        route = self._routes.get(scope.get("endpoint"), OTHER)
        method = scope.get("method", "WEBSOCKET")
        method = method if method in _METHODS or method == "WEBSOCKET" else OTHER
        status = exchange.status or _GONE
        self.recorder.http[method, route, str(status)] += 1
        level = logging.DEBUG if (route in PROBES or route.startswith("/page/")) and status < 400 else logging.INFO
        if not logger.isEnabledFor(level):
            return
        fields: dict[str, Any] = {
            "request_id": request_id,
            "tenant": tenant,
            "method": method,
            "route": route,
            "status": status,
            "seconds": between(exchange.began, time.perf_counter()),
        }
        if exchange.figures is not None:
            fields |= exchange.figures.shown()
        logger.log(level, "%s", Line("request", fields))
