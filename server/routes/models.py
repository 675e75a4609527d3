"""GET /v1/models and /v1/models/{model}: the models that are served; never loads anything."""

from __future__ import annotations

from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from headrace.server.service import Service

__all__ = ["list_models", "show_model"]


async def list_models(request: Request) -> Response:
    """List every model that requests may name."""
    service: Service = request.app.state.service
    names = [info.name for info in service.engine.adapters.list()]
    return JSONResponse({"object": "list", "data": [_model(service), *(_adapter(service, name) for name in names)]})


async def show_model(request: Request) -> Response:
    """Describe one model."""
    service: Service = request.app.state.service
    adapter = service.adapter_of(request.path_params["model"])
    return JSONResponse(_model(service) if adapter is None else _adapter(service, adapter))


def _adapter(service: Service, name: str) -> dict[str, Any]:
    return {**_model(service), "id": name, "parent": service.model}


def _model(service: Service) -> dict[str, Any]:
    info = service.engine.info
    return {
        "id": service.model,
        "object": "model",
        "created": service.created,
        "owned_by": "headrace",
        "max_model_len": info.max_context,
    }
