"""/v1/adapters: load, list and unload adapters below the server's folder; for admin keys alone."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from pydantic import ValidationError
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from headrace.engine import AdapterRejected
from headrace.server.errors import ApiError, as_api_error, shape_error
from headrace.server.http.body import read_json
from headrace.server.protocol.adapters import AdapterFields
from headrace.server.service import Service

__all__ = ["list_adapters", "load_adapter", "unload_adapter"]


async def list_adapters(request: Request) -> Response:
    """List every adapter that is loaded."""
    service: Service = request.app.state.service
    return JSONResponse({"object": "list", "data": [_card(each) for each in service.engine.adapters.list()]})


async def load_adapter(request: Request) -> Response:
    """Load an adapter, or replace the one that has its name."""
    service: Service = request.app.state.service
    root = service.settings.adapter_folder
    if root is None:
        raise ApiError(403, "adapters_not_configured", "the server was given no folder of adapters")
    name: str = request.path_params["name"]
    try:
        fields = AdapterFields(**await read_json(request.scope, request.receive, service.settings))
    except ValidationError as error:
        raise shape_error(error) from None
    service.check_accepting()
    if name == service.model:
        raise ApiError(400, "adapter_invalid", "name: is the model's", param="name")
    adapters = service.engine.adapters
    try:
        loaded = await adapters.load(name, fields.folder or name, root=root, pinned=fields.pinned)
    except AdapterRejected as error:
        raise as_api_error(error).renamed({"path": "folder"}) from error
    return JSONResponse(_card(loaded))


async def unload_adapter(request: Request) -> Response:
    """Unload an adapter; requests that use it finish."""
    service: Service = request.app.state.service
    name: str = request.path_params["name"]
    await service.engine.adapters.unload(name)
    return JSONResponse({"id": name, "object": "adapter", "deleted": True})


def _card(info: Any) -> dict[str, Any]:
    fields = asdict(info)
    return {"id": fields.pop("name"), "object": "adapter", **fields}
