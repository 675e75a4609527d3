"""GET /openapi.json: the document of all endpoints; protocol/document/openapi.py makes it."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from headrace.server.protocol.document.openapi import document, operations
from headrace.server.routes.tokens import DetokenizeFields, TokenizeFields
from headrace.server.service import Service

__all__ = ["openapi"]


async def openapi(request: Request) -> Response:
    """Return the OpenAPI document of this server."""
    service: Service = request.app.state.service
    keys = bool(service.settings.api_keys or service.settings.admin_keys)
    root: str = request.scope.get("root_path", "")
    return JSONResponse(document(operations(TokenizeFields, DetokenizeFields), root=root, keys=keys))
