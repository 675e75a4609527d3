"""Reads the JSON body of a request within limits of size, time and nesting; never looks at what it says."""

from __future__ import annotations

from typing import Any

import anyio
import orjson
from anyio.to_thread import run_sync
from starlette.types import Receive, Scope

from headrace.engine.concurrency.garbage import not_collected
from headrace.server.errors import ApiError
from headrace.server.settings import ServerSettings

__all__ = ["ClientGone", "announced", "nests_deeper", "read_json"]

_CLOSE = {"connection": "close"}
_LONG = 2**18  # bytes that take some milliseconds: longer bodies are not parsed on the event loop
_MAX_PARTS = 20_000  # parts of a body, each of which costs a turn of the event loop


class ClientGone(Exception):
    """The client went away before its request was complete; nobody is left to answer."""


async def read_json(scope: Scope, receive: Receive, settings: ServerSettings) -> dict[str, Any]:
    """Return the object in a request's body.

    Raises:
        ApiError: The body is no JSON object, or is too large, too slow, too deep, or of another type.
        ClientGone: The client went away meanwhile.
    """
    headers = dict(scope["headers"])
    kind = headers.get(b"content-type", b"").split(b";")[0].strip().lower()
    if kind != b"application/json":
        told = "the body must be JSON, with the header Content-Type: application/json"
        raise ApiError(415, "unsupported_media_type", told, headers=_CLOSE)
    if headers.get(b"content-encoding", b"identity").strip().lower() != b"identity":
        raise ApiError(415, "unsupported_media_type", "the body must not be compressed", headers=_CLOSE)
    if b"content-length" in headers and b"transfer-encoding" in headers:  # proxies choose one or the other
        raise ApiError(400, "invalid_http", "the body has two lengths", headers=_CLOSE)
    limit = settings.max_body_bytes
    length = headers.get(b"content-length", b"0")
    if not length.isdigit() or int(length[:20]) > limit:
        raise _too_large(limit)
    try:
        with anyio.fail_after(settings.body_timeout):
            body = await _read(receive, limit)
    except TimeoutError:
        seconds = f"the body did not arrive within {settings.body_timeout:g} seconds"
        raise ApiError(408, "request_timeout", seconds, headers=_CLOSE) from None
    if len(body) > _LONG:
        return await run_sync(_parse_long, body, settings.max_nesting)
    return _parse(body, settings.max_nesting)


def _parse_long(body: bytes, max_nesting: int) -> dict[str, Any]:
    """Parse a long body without the garbage collector, which would visit the new objects repeatedly."""
    with not_collected():
        return _parse(body, max_nesting)


def _parse(body: bytes, max_nesting: int) -> dict[str, Any]:
    try:
        value = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise ApiError(400, "invalid_json", f"the body is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise ApiError(400, "invalid_type", "the body must be a JSON object")
    if nests_deeper(value, max_nesting):
        raise ApiError(400, "invalid_json", f"the body nests deeper than {max_nesting}")
    return value


def announced(scope: Scope, settings: ServerSettings) -> int:
    """Return the bytes that a request's body will have, at most the limit; the limit where the request names none."""
    length = dict(scope["headers"]).get(b"content-length", b"")
    return min(int(length[:20]), settings.max_body_bytes) if length.isdigit() else settings.max_body_bytes


async def _read(receive: Receive, limit: int) -> bytes:
    parts: list[bytes] = []
    size = 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientGone
        part = message.get("body", b"")
        size += len(part)
        if size > limit or len(parts) > _MAX_PARTS:
            raise _too_large(limit)
        parts.append(part)
        if not message.get("more_body", False):
            return b"".join(parts)


def _too_large(limit: int) -> ApiError:
    return ApiError(413, "request_too_large", f"the body may have {limit} bytes", headers=_CLOSE)


def nests_deeper(value: Any, limit: int) -> bool:
    """Return whether arrays and objects of JSON nest deeper than `limit` levels in `value`, itself counted."""
    level = [value]
    while level:
        if not limit:
            return True
        limit -= 1
        inner = [part.values() if isinstance(part, dict) else part for part in level]
        level = [item for part in inner for item in part if isinstance(item, dict | list)]
    return False
