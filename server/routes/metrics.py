"""GET /metrics: the application's metrics as Prometheus scrapes them; the gate decides who may read them."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from headrace.server.observability.exporter import MEDIA_TYPE, Exporter

__all__ = ["show_metrics"]


async def show_metrics(request: Request) -> Response:
    """Return every metric as text."""
    exporter: Exporter = request.app.state.exporter
    return Response(exporter.text(), headers={"content-type": MEDIA_TYPE, "cache-control": "no-store"})
