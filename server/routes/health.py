"""GET /health/live, /health/ready and /version: whether the server works, and the version of headrace."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from headrace.engine.version import headrace_version
from headrace.server.service import Service

__all__ = ["live", "ready", "show_version"]


async def live(request: Request) -> Response:
    """Answer that the process is live."""
    return JSONResponse({"status": "live"})


async def ready(request: Request) -> Response:
    """Answer that the engine makes progress and takes requests, or 503 and the reason why it does not."""
    service: Service = request.app.state.service
    trouble = service.trouble()
    if trouble is None:
        return JSONResponse({"status": "ready"})
    return JSONResponse({"status": "not ready", "reason": trouble}, status_code=503)


async def show_version(request: Request) -> Response:
    """Return the version of headrace in the form of vLLM's endpoint of that name."""
    return JSONResponse({"version": headrace_version()})
