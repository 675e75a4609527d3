"""`Gate`: checks host, origin, sizes and key of every request before its route; pure ASGI, never reads a body.

It refuses by default: a path that is not public needs a key wherever there are keys, on HTTP and WebSocket alike, and
it looks at the raw path alone, never at a URL put together from headers. Errors that nobody has caught end here.
"""

from __future__ import annotations

import base64
import logging
import re
import secrets
from functools import partial
from typing import Final

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from headrace.engine.tokens.panics import is_failure
from headrace.server.auth import ANYBODY, Caller, Keyring
from headrace.server.errors import ERROR_BODY, ApiError, as_api_error, error_response, messages_error_body
from headrace.server.observability.telemetry import EXCHANGE, Exchange, Telemetry
from headrace.server.observability.tracing import continued
from headrace.server.routes.page import ASSETS
from headrace.server.settings import ServerSettings

__all__ = [
    "ADMIN_PATHS",
    "CALLER",
    "MESSAGES_PATH",
    "METRICS_PATH",
    "PUBLIC_PATHS",
    "REQUEST_ID",
    "SUBPROTOCOL",
    "Gate",
]

logger = logging.getLogger("headrace.server")

CALLER: Final = "headrace.caller"
"""Key of the scope under which routes find the `Caller` of a request."""
REQUEST_ID: Final = "headrace.request_id"
PUBLIC_PATHS: Final = frozenset({"/health", "/health/live", "/health/ready", "/ping"})
ADMIN_PATHS: Final = ("/v1/admin/", "/v1/adapters")
"""Beginnings of the paths that need an admin key."""
MESSAGES_PATH: Final = "/v1/messages"
"""Anthropic's endpoint, with errors and a header of the request id as its clients know them."""
METRICS_PATH: Final = "/metrics"
SUBPROTOCOL: Final = "headrace"
"""Subprotocol for clients that cannot send headers; a second one is `headrace.key.` and the key in base64url."""

_CLIENT_ID: Final = re.compile(rb"[A-Za-z0-9._-]{1,128}")
_PORT: Final = re.compile(rb":\d{1,5}$")


class Gate:
    """ASGI middleware that lets permitted requests through and refuses the others."""

    def __init__(self, app: ASGIApp, *, settings: ServerSettings, telemetry: Telemetry) -> None:
        """Guard `app` as `settings` say, reporting to `telemetry`."""
        self._app = app
        self._settings = settings
        self._telemetry = telemetry
        self._keys = Keyring(settings.api_keys, settings.admin_keys)
        self._metrics_keys = Keyring({} if settings.metrics_key is None else {"metrics": settings.metrics_key}, {})
        self._hosts = frozenset(host.lower().encode() for host in settings.allowed_hosts)
        self._origins = frozenset(origin.lower().rstrip("/").encode() for origin in settings.allowed_origins)
        self._public = PUBLIC_PATHS | (ASSETS.keys() if settings.page else frozenset())
        # The server's own page may ask, unless a page that lured a browser here could pass for it.
        self._trusts_itself = settings.page and (b"*" not in self._hosts or not self._keys.empty)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve a request or refuse it; pass the lifespan on."""
        if scope["type"] not in ("http", "websocket"):
            await self._app(scope, receive, send)
            return
        headers: list[tuple[bytes, bytes]] = scope["headers"]
        identity = _request_id(headers)
        scope[REQUEST_ID] = identity.decode()
        path = _path(scope)
        more = [(b"x-request-id", identity)]
        if path.startswith(MESSAGES_PATH):
            scope[ERROR_BODY] = partial(messages_error_body, request_id=scope[REQUEST_ID])
            more.append((b"request-id", identity))

        scope[EXCHANGE] = exchange = Exchange()

        async def send_with_id(message: Message) -> None:
            if message["type"] in _STARTS:
                exchange.status = message.get("status", 101)
                message.setdefault("headers", [])
                message["headers"] = [*message["headers"], *more]
            await send(message)

        try:
            self._check(scope, path, headers)
            with continued(headers):
                await self._app(scope, receive, send_with_id)
        except BaseException as error:
            if not is_failure(error):
                raise
            if not isinstance(error, ApiError):
                logger.error("request %s failed", scope[REQUEST_ID], exc_info=error)
            if not exchange.status:
                await error_response(as_api_error(error), scope)(scope, receive, send_with_id)
        finally:
            caller: Caller | None = scope.get(CALLER)
            self._telemetry.exchanged(scope, exchange, scope[REQUEST_ID], None if caller is None else caller.name)

    def _check(self, scope: Scope, path: str, headers: list[tuple[bytes, bytes]]) -> None:
        """Refuse a request that is not permitted; store its `Caller` in the scope."""
        self._check_sizes(scope, headers)
        self._check_host(headers)
        scope[CALLER] = self._caller(scope["type"], path, headers)

    def _check_sizes(self, scope: Scope, headers: list[tuple[bytes, bytes]]) -> None:
        settings = self._settings
        if len(scope.get("raw_path") or b"") + len(scope.get("query_string", b"")) > settings.max_url_bytes:
            raise ApiError(414, "url_too_long", f"the URL may have {settings.max_url_bytes} bytes")
        if sum(len(name) + len(value) for name, value in headers) > settings.max_header_bytes:
            raise ApiError(431, "headers_too_large", f"the headers may have {settings.max_header_bytes} bytes")

    def _check_host(self, headers: list[tuple[bytes, bytes]]) -> None:
        hosts = [value for name, value in headers if name == b"host"]
        if b"*" not in self._hosts:
            host = _PORT.sub(b"", hosts[0].strip().lower()) if len(hosts) == 1 else b""
            if host not in self._hosts:
                raise ApiError(403, "host_not_allowed", _FOREIGN_HOST)
        for name, value in headers:
            if name == b"origin" and value.lower() not in self._origins and not self._is_own(value, hosts):
                raise ApiError(403, "origin_not_allowed", _FOREIGN_ORIGIN)

    def _is_own(self, origin: bytes, hosts: list[bytes]) -> bool:
        """Return whether `origin` is this server, as the client calls it; TLS may end in front of the server."""
        own = [scheme + host.strip() for host in hosts for scheme in (b"http://", b"https://")]
        return self._trusts_itself and len(hosts) == 1 and origin in own

    def _caller(self, kind: str, path: str, headers: list[tuple[bytes, bytes]]) -> Caller:
        if path == METRICS_PATH:
            return self._reader_of_metrics(headers)
        if self._keys.empty:
            if path.startswith(ADMIN_PATHS):
                told = "this needs an admin key, and the server has none: --admin-api-key sets one"
                raise ApiError(403, "admin_only", told)
            return ANYBODY
        if path in self._public and kind == "http":
            return ANYBODY
        caller = self._keys.caller(_secret(headers))
        if caller is None:
            raise _no_key()
        if path.startswith(ADMIN_PATHS) and not caller.admin:
            raise ApiError(403, "admin_only", "this needs an admin key")
        return caller

    def _reader_of_metrics(self, headers: list[tuple[bytes, bytes]]) -> Caller:
        """Return the caller that reads the metrics, which name all tenants: a key for generation does not suffice."""
        if self._keys.empty and self._metrics_keys.empty:
            if self._hosts <= _LOOPBACK:
                return ANYBODY
            told = "this needs a metrics key or an admin key, and the server has none: --metrics-api-key sets one"
            raise ApiError(403, "admin_only", told)
        secret = _secret(headers)
        caller, reader = self._keys.caller(secret), self._metrics_keys.caller(secret)
        if reader is not None:
            return reader
        if caller is None:
            raise _no_key()
        if not caller.admin:
            raise ApiError(403, "admin_only", "this needs a metrics key or an admin key")
        return caller


_FOREIGN_HOST = (
    "this server does not answer to that Host; its operator allows more with --allowed-hosts (allowed_hosts of "
    "ServerSettings)"
)
_FOREIGN_ORIGIN = (
    "pages of that Origin may not ask this server; its operator allows more with --allowed-origins (allowed_origins of "
    "ServerSettings)"
)
_LOOPBACK = frozenset({b"localhost", b"127.0.0.1", b"[::1]"})
_STARTS = frozenset({"http.response.start", "websocket.http.response.start", "websocket.accept"})
_KEY_PROTOCOL = SUBPROTOCOL.encode() + b".key."


def _secret(headers: list[tuple[bytes, bytes]]) -> bytes:
    """Return the one key that a request shows; empty, which no key is, where it shows none or several."""
    given = [secret for name, value in headers for secret in _secrets(name, value)]
    return given[0] if len(given) == 1 else b""


def _secrets(name: bytes, value: bytes) -> list[bytes]:
    """Return the keys in a header."""
    if name == b"x-api-key":
        return [value.strip()]
    if name == b"authorization":
        scheme, _, secret = value.partition(b" ")
        return [secret.strip() if scheme.lower() == b"bearer" else b""]
    if name == b"sec-websocket-protocol":
        protocols = (protocol.strip() for protocol in value.split(b","))
        return [
            _decoded(protocol[len(_KEY_PROTOCOL) :]) for protocol in protocols if protocol.startswith(_KEY_PROTOCOL)
        ]
    return []


def _decoded(text: bytes) -> bytes:
    """Decode base64url without padding; return empty bytes where `text` is something else."""
    try:
        return base64.b64decode(text + b"=" * (-len(text) % 4), altchars=b"-_", validate=True)
    except ValueError:
        return b""


def _no_key() -> ApiError:
    message = "give one valid key, as `Authorization: Bearer KEY` or `x-api-key: KEY`"
    return ApiError(401, "invalid_api_key", message, headers={"www-authenticate": "Bearer"})


def _path(scope: Scope) -> str:
    """Return the path below the application's mount point."""
    path: str = scope["path"]
    root = scope.get("root_path", "")
    return path[len(root) :] if root and path.startswith(root) else path


def _request_id(headers: list[tuple[bytes, bytes]]) -> bytes:
    """Return the client's own id where it is harmless, else a new one; it is echoed and logged, never looked up."""
    given = [value for name, value in headers if name == b"x-request-id"]
    if len(given) == 1 and _CLIENT_ID.fullmatch(given[0]):
        return given[0]
    return b"req_" + secrets.token_hex(12).encode()
