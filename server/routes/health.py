"""GET /health/live and /health/ready: whether the process answers, and whether the engine makes progress."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from headrace.server.service import Service

__all__ = ["live", "ready"]


async def live(request: Request) -> Response:
    """The process answers."""
    return JSONResponse({"status": "live"})


async def ready(request: Request) -> Response:
    """The engine makes progress and takes requests; 503 otherwise."""
    service: Service = request.app.state.service
    trouble = service.trouble()
    if trouble is None:
        return JSONResponse({"status": "ready"})
    return JSONResponse({"status": "not ready", "reason": trouble}, status_code=503)
