"""GET and PUT /v1/admin/keys/{name}/limits: a key's limits, changed while the server runs; for admin keys alone."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from headrace.server.errors import ApiError
from headrace.server.http.body import read_json
from headrace.server.service import Service
from headrace.server.settings import KeyLimits

__all__ = ["change_limits", "show_limits"]


async def show_limits(request: Request) -> Response:
    """Return the limits of a key."""
    service: Service = request.app.state.service
    return JSONResponse(service.limits.limits_of(_name(request)).model_dump())


async def change_limits(request: Request) -> Response:
    """Replace the limits of a key."""
    service: Service = request.app.state.service
    name = _name(request)
    limits = KeyLimits(**await read_json(request.scope, request.receive, service.settings))
    service.limits.set_limits(name, limits)
    return JSONResponse(limits.model_dump())


def _name(request: Request) -> str:
    settings = request.app.state.service.settings
    name: str = request.path_params["name"]
    if name not in settings.api_keys and name not in settings.admin_keys:
        raise ApiError(404, "key_not_found", "no key has that name", param="name")
    return name
