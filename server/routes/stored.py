"""GET and DELETE /v1/responses/{response_id}, and its input items: stored responses; never generates."""

from __future__ import annotations

from typing import Any

import orjson
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from headrace.server.errors import ApiError
from headrace.server.http.gate import CALLER
from headrace.server.service import Service
from headrace.server.stored import StoredResponse

__all__ = ["delete_response", "list_input_items", "show_response"]

_MOST_ITEMS = 100
_DEFAULT_ITEMS = 20


async def show_response(request: Request) -> Response:
    """Return one stored response."""
    if request.query_params.get("stream", "false") != "false":
        raise ApiError(400, "unsupported_parameter", "stream: a stored response is not streamed again", param="stream")
    return Response(_stored(request).body, media_type="application/json")


async def delete_response(request: Request) -> Response:
    """Delete a stored response."""
    service: Service = request.app.state.service
    identity: str = request.path_params["response_id"]
    service.responses.delete(request.scope[CALLER].name, identity)
    return JSONResponse({"id": identity, "object": "response", "deleted": True})


async def list_input_items(request: Request) -> Response:
    """List the input items of a stored response in pages, the last item first unless `order` is asc."""
    items: list[dict[str, Any]] = orjson.loads(_stored(request).items)
    query = request.query_params
    order, limit, after = query.get("order", "desc"), query.get("limit", str(_DEFAULT_ITEMS)), query.get("after")
    if order not in ("asc", "desc"):
        raise ApiError(400, "invalid_value", f"order: must be asc or desc, got {order[:80]!r}", param="order")
    if not limit.isdecimal() or len(limit) > 3 or not 1 <= int(limit) <= _MOST_ITEMS:
        message = f"limit: must be from 1 to {_MOST_ITEMS}, got {limit[:80]!r}"
        raise ApiError(400, "invalid_value", message, param="limit")
    if order == "desc":
        items.reverse()
    start = 0
    if after is not None:
        start = next((place for place, item in enumerate(items, 1) if item["id"] == after), -1)
        if start < 0:
            raise ApiError(400, "invalid_value", f"after: there is no item {after[:80]!r}", param="after")
    page = items[start : start + int(limit)]
    first, last = (page[0]["id"], page[-1]["id"]) if page else ("", "")
    more = start + len(page) < len(items)
    return JSONResponse({"object": "list", "data": page, "first_id": first, "last_id": last, "has_more": more})


def _stored(request: Request) -> StoredResponse:
    """Return the response that the path names.

    Raises:
        ApiError: 404 where this caller has no response of that id.
    """
    service: Service = request.app.state.service
    return service.responses.get(request.scope[CALLER].name, request.path_params["response_id"])
