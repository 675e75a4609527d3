"""`openai_transport`: an engine as a transport of httpx, so that clients of OpenAI's API run in the engine's process.

Each request runs through the application of `create_app` in a task of its own: what it streams is read as it comes, a
reader that lags holds it up, and closing the response cancels it. httpx's own `ASGITransport` collects a whole answer
before it hands out its first byte. Clients of `httpx` and of `httpx2` work alike; neither is imported at import time.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import suppress
from functools import cache
from importlib import import_module
from types import ModuleType, TracebackType
from typing import TYPE_CHECKING, Any, Self
from urllib.parse import unquote

import anyio
from starlette.types import ASGIApp, Message, Scope

from headrace.engine import Engine, HeadraceError
from headrace.engine.concurrency.background import start_background
from headrace.engine.concurrency.mailbox import Alarm
from headrace.engine.concurrency.threads import Poster
from headrace.engine.tokens.panics import is_failure
from headrace.server.app import create_app
from headrace.server.settings import KeyLimits, ServerSettings

if TYPE_CHECKING:  # at run time, the client's own httpx is used
    from httpx2 import AsyncBaseTransport
else:
    AsyncBaseTransport = object

__all__ = ["OpenAITransport", "openai_transport"]

logger = logging.getLogger("headrace.server")

_DAY = 86_400.0
_TRUSTED = ServerSettings(
    default_limits=KeyLimits(min_priority=-1000),
    max_choices=128,
    max_queue=2**30,
    max_queue_tokens=2**40,
    queue_timeout=_DAY,
    request_timeout=_DAY,
    stall_timeout=_DAY,
)
"""Settings of an application that asks itself: bounds that protect a server from strangers would only hinder it."""

_MOST_UNREAD = 65_536
"""Bytes that may wait for their reader before the application has to wait; the same bound as uvicorn's."""


def openai_transport(engine: Engine, settings: ServerSettings | None = None) -> OpenAITransport:
    """Make a transport that answers OpenAI's and Anthropic's API from `engine`, with no socket.

    `AsyncOpenAI(base_url="http://headrace/v1", api_key="none", http_client=httpx.AsyncClient(transport=...))` then runs
    on the engine, and so does whatever takes such a client. The host in `base_url` is not looked at.

    Args:
        engine: An engine that the caller opens and closes, on the event loop that the client runs on.
        settings: Names, keys and limits, as for `create_app`; `allowed_hosts`, `page` and `adapters` are not looked at.
            By default there are no keys and no limits beyond the engine's own.
    """
    settings = _TRUSTED if settings is None else settings
    app = create_app(engine, settings.model_copy(update={"allowed_hosts": ("*",), "page": False}))
    return OpenAITransport(engine, app)


class OpenAITransport(AsyncBaseTransport):
    """A transport for `httpx.AsyncClient` and `httpx2.AsyncClient`; made by `openai_transport`."""

    def __init__(self, engine: Engine, app: ASGIApp) -> None:
        """Answer from `app`, which serves `engine`."""
        self._engine = engine
        self._app = app
        self._running: set[_Exchange] = set()

    async def handle_async_request(self, request: Any) -> Any:
        """Answer a request; returns once status and headers are known.

        Raises:
            ReadTimeout: Nothing came for as long as the client's read timeout; httpx's own error.
            RuntimeError: The client does not run on the event loop that the engine was opened on.
        """
        with suppress(HeadraceError):  # the application reports an engine that is closed
            self._engine.info  # noqa: B018 - raises on another event loop
        library = import_module(type(request).__module__.partition(".")[0])
        exchange = _Exchange(self._app, _scope_of(request), await request.aread())
        self._running.add(exchange)
        exchange.start(self._running.discard)
        body = _body_class(library)(exchange, library, request)
        try:
            await body.wait(exchange.begun.wait)
            if not exchange.status:
                raise library.RemoteProtocolError("the application gave no answer", request=request)
        except BaseException:
            exchange.cancel()
            raise
        return library.Response(exchange.status, headers=exchange.headers, stream=body, request=request)

    async def aclose(self) -> None:
        """Cancel all requests that still run, and wait for their ends; the transport may be used again."""
        for exchange in list(self._running):
            exchange.cancel()
        for exchange in list(self._running):
            await exchange.ended.wait()

    async def __aenter__(self) -> Self:
        """Return the transport itself."""
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None = None,
        error: BaseException | None = None,
        trace: TracebackType | None = None,
    ) -> None:
        """Do what `aclose` does."""
        await self.aclose()


class _Exchange:
    """One request and its answer: the application writes in a task of its own, and the client reads in another."""

    def __init__(self, app: ASGIApp, scope: Scope, body: bytes) -> None:
        """Ask `app` for an answer to the request of `scope` and `body`, once started."""
        self.status = 0
        """HTTP status of the answer; 0 before there is one."""
        self.headers: list[tuple[bytes, bytes]] = []
        self.begun = anyio.Event()
        """Event that is set once status and headers are known, or never will be."""
        self.ended = anyio.Event()
        """Event that is set once the application has returned."""
        self._app = app
        self._asked = scope
        self._body: bytes | None = body
        self._unread: list[bytes] = []
        self._unread_bytes = 0
        self._complete = False
        self._reader = Alarm()
        self._writer = Alarm()
        self._tasks = anyio.CancelScope()

    def start(self, ended: Callable[[_Exchange], object]) -> None:
        """Start the application; `ended` is called once it has returned."""

        async def run() -> None:
            try:
                with self._tasks:
                    await self._app(self._asked, self._receive, self._send)
            except BaseException as error:
                if not is_failure(error):
                    raise
                logger.error("the application failed", exc_info=error)
            finally:
                self.begun.set()
                self.ended.set()
                self._reader.ring()
                ended(self)

        start_background(run, self.cancel, "headrace in-process request")

    def cancel(self) -> None:
        """Cancel the application, unless it has given its whole answer; later calls do nothing."""
        if not self._complete:
            self._tasks.cancel()

    async def take(self) -> bytes | None:
        """Wait for data, and return all of it; return b"" at the end, or None if the application ended too early.

        Only one task may read at a time.
        """
        while not (self._unread or self._complete or self.ended.is_set()):
            await self._reader.sleep()
        part = b"".join(self._unread)
        self._unread.clear()
        self._unread_bytes = 0
        self._writer.ring()
        return part if part or self._complete else None

    async def _receive(self) -> Message:
        body, self._body = self._body, None
        if body is None:
            await anyio.sleep_forever()  # a client that goes away cancels the application instead
        return {"type": "http.request", "body": body, "more_body": False}

    async def _send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status, self.headers = message["status"], message.get("headers", [])
            self.begun.set()
            return
        part = message.get("body", b"")
        if part:
            self._unread.append(part)
            self._unread_bytes += len(part)
        self._complete = not message.get("more_body", False)
        self._reader.ring()
        while self._unread_bytes > _MOST_UNREAD and not self._complete:
            await self._writer.sleep()


class _Body:
    """The body of a response, read as it comes; closing it, or dropping it, cancels what still runs."""

    def __init__(self, exchange: _Exchange, library: ModuleType, request: Any) -> None:
        """Read the answer of `exchange`; `library` is the httpx of `request`."""
        self._exchange = exchange
        self._library = library
        self._request = request
        self._seconds: float | None = request.extensions.get("timeout", {}).get("read")
        self._post = Poster()

    async def wait(self, call: Callable[[], Awaitable[Any]]) -> Any:
        """Return the result of `call` within the client's read timeout.

        Raises:
            ReadTimeout: The call takes longer.
        """
        with anyio.move_on_after(self._seconds):
            return await call()
        raise self._library.ReadTimeout(f"nothing came for {self._seconds:g} seconds", request=self._request)

    async def __aiter__(self) -> AsyncIterator[bytes]:
        """Iterate over parts of the body, each of which is all that came since the last.

        Raises:
            ReadTimeout: No part came for as long as the client's read timeout.
            RemoteProtocolError: The application ended before its answer did.
        """
        try:
            while part := await self.wait(self._exchange.take):
                yield part
        finally:
            self._exchange.cancel()
        if part is None:
            raise self._library.RemoteProtocolError("the answer ended before its time", request=self._request)

    async def aclose(self) -> None:
        """Cancel what still runs, and wait until the application has returned."""
        self._exchange.cancel()
        await self._exchange.ended.wait()

    def __del__(self) -> None:
        """Cancel a request whose reader is gone; runs in any thread, so it only posts."""
        if not self._exchange.ended.is_set():
            self._post(self._exchange.cancel)


@cache
def _body_class(library: ModuleType) -> type[_Body]:
    """Return `_Body` as a stream of that httpx, which takes no other."""
    return type("Body", (_Body, library.AsyncByteStream), {})


def _scope_of(request: Any) -> Scope:
    """Return the ASGI scope of a request of httpx."""
    url = request.url
    raw_path, _, query = url.raw_path.partition(b"?")
    return {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.4"},
        "http_version": "1.1",
        "method": request.method,
        "scheme": url.scheme,
        "path": unquote(raw_path.decode("ascii")),
        "raw_path": raw_path,
        "query_string": query,
        "root_path": "",
        "headers": [(name.lower(), value) for name, value in request.headers.raw],
        "server": (url.host, url.port),
        "client": None,
    }
