"""GET /health/live, /health/ready and /version: whether the server works, and which headrace it is."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from headrace.server.service import Service, headrace_version

__all__ = ["live", "ready", "show_version"]


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


async def show_version(request: Request) -> Response:
    """The version of headrace, as vLLM's endpoint of that name gives its own."""
    return JSONResponse({"version": headrace_version()})
