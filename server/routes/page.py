"""GET / and its parts: the chat playground's static files and the load that it shows; holds no chat itself.

The files need no key and name nothing of the server. The page's own requests need a key where there are keys.
"""

from __future__ import annotations

import hashlib
from importlib.resources import files
from typing import Final

from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from headrace.server.service import Service

__all__ = ["ASSETS", "page_routes"]

_SCRIPTS: Final = (
    "colours", "drawer", "elements", "history", "main", "markdown", "messages", "panel", "server"
)  # fmt: skip
ASSETS: Final = {
    "/": ("index.html", "text/html; charset=utf-8"),
    "/page/icon.svg": ("icon.svg", "image/svg+xml"),
    "/page/style.css": ("style.css", "text/css; charset=utf-8"),
    **{f"/page/{name}.js": (f"{name}.js", "text/javascript; charset=utf-8") for name in _SCRIPTS},
}
"""Path -> the file and its media type."""

# The policy allows nothing from elsewhere, no inline script or style, and no way to make elements out of text.
_POLICY: Final = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; base-uri 'none'; "
    "form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'; trusted-types 'none'"
)
_HEADERS: Final = {
    "content-security-policy": _POLICY,
    "cache-control": "no-cache",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
}


class _Asset:
    """One file, as an ASGI application."""

    def __init__(self, name: str, media_type: str) -> None:
        """Read the file `name`, once."""
        self._content = files("headrace.server").joinpath("page", name).read_bytes()
        self._tag = f'"{hashlib.sha256(self._content).hexdigest()[:16]}"'
        self._headers = _HEADERS | {"content-type": media_type, "etag": self._tag}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the file, unless the client has it."""
        known = Headers(scope=scope).get("if-none-match") == self._tag
        response = Response(b"" if known else self._content, status_code=304 if known else 200, headers=self._headers)
        await response(scope, receive, send)


def page_routes() -> list[Route]:
    """Return the page's routes, which are no part of the API."""
    assets = [
        Route(path, _Asset(name, media_type), methods=["GET"], include_in_schema=False)
        for path, (name, media_type) in ASSETS.items()
    ]
    return [*assets, Route("/page/load", _load, methods=["GET"], include_in_schema=False)]


async def _load(request: Request) -> Response:
    """Report the engine's load over all requests together, without totals and without any single request."""
    service: Service = request.app.state.service
    stats = service.engine.stats()
    body = {
        "trouble": service.trouble(),
        "tokens_per_second": stats.tokens_per_second,
        "step_seconds": stats.step_seconds,
        "running": stats.running,
        "waiting": stats.waiting,
        "paused": stats.paused,
        "pages": stats.pages,
        "pages_held": stats.pages_held,
        "pages_cached": stats.pages_cached,
        "cache_hit_rate": round(stats.cached_tokens / stats.prompt_tokens, 2) if stats.prompt_tokens else None,
    }
    return JSONResponse(body, headers={"cache-control": "no-store"})
