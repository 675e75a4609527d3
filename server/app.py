"""`create_app`: an engine as a Starlette application with OpenAI's and Anthropic's endpoints; owns routes and lifespan.

It may be mounted under another application, whose lifespan then opens the engine.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route, WebSocketRoute

from headrace.engine import Engine, EngineStopped, HeadraceError
from headrace.server.errors import ApiError, as_api_error, error_response
from headrace.server.http.body import ClientGone
from headrace.server.http.gate import MESSAGES_PATH, Gate
from headrace.server.http.sse import MESSAGES
from headrace.server.observability.exporter import Exporter
from headrace.server.observability.watchdog import Watchdog
from headrace.server.routes.adapters import list_adapters, load_adapter, unload_adapter
from headrace.server.routes.admin import change_limits, show_limits
from headrace.server.routes.generation import GenerationRoute, ask_chat, ask_completion
from headrace.server.routes.health import live, ready, show_version
from headrace.server.routes.messages import ask_message, count_tokens
from headrace.server.routes.metrics import show_metrics
from headrace.server.routes.models import list_models, show_model
from headrace.server.routes.openapi import openapi
from headrace.server.routes.page import page_routes
from headrace.server.routes.responses import ResponseRoute
from headrace.server.routes.stored import delete_response, list_input_items, show_response
from headrace.server.routes.tokens import detokenize, show_tokenizer, tokenize
from headrace.server.routes.vectors import VectorRoute, ask_embeddings, ask_ranks, ask_scores
from headrace.server.routes.websocket import ChatSocketRoute
from headrace.server.service import Service
from headrace.server.settings import ServerSettings

__all__ = ["create_app"]

_DEFAULTS = ServerSettings()


def create_app(engine: Engine, settings: ServerSettings = _DEFAULTS) -> Starlette:
    """Return an application that serves `engine`.

    Args:
        engine: An engine, open or not; the application's lifespan opens and closes one that is not open.
        settings: Keys, limits and names. By default anybody on this machine may ask.

    Returns:
        A Starlette application; `app.state.service` holds its `Service`.
    """
    routes = _routes()
    if settings.page:
        routes += page_routes()
    service = Service(engine, settings)
    service.telemetry.name_routes(routes)
    routes += _second_paths(routes)
    app = Starlette(
        routes=routes,
        middleware=[*_for_pages(settings), Middleware(Gate, settings=settings, telemetry=service.telemetry)],
        exception_handlers={
            ApiError: _told,
            HeadraceError: _told,
            ClientGone: _nobody,
            HTTPException: _http_error,
        },
        lifespan=_lifespan,
    )
    app.router.redirect_slashes = False
    app.state.service = service
    app.state.exporter = Exporter(service)
    return app


def _routes() -> list[BaseRoute]:
    """Return the endpoints, each under the path by which it is logged and counted."""
    return [
        Route("/v1/chat/completions", GenerationRoute(ask_chat), methods=["POST"]),
        WebSocketRoute("/v1/chat/completions", ChatSocketRoute()),
        Route("/v1/completions", GenerationRoute(ask_completion), methods=["POST"]),
        Route("/v1/responses", ResponseRoute(), methods=["POST"]),
        Route("/v1/responses/{response_id}", show_response, methods=["GET"]),
        Route("/v1/responses/{response_id}", delete_response, methods=["DELETE"]),
        Route("/v1/responses/{response_id}/input_items", list_input_items, methods=["GET"]),
        Route(MESSAGES_PATH, GenerationRoute(ask_message, MESSAGES), methods=["POST"]),
        Route(f"{MESSAGES_PATH}/count_tokens", count_tokens, methods=["POST"]),
        Route("/v1/embeddings", VectorRoute(ask_embeddings), methods=["POST"]),
        Route("/v1/score", VectorRoute(ask_scores), methods=["POST"]),
        Route("/v1/rerank", VectorRoute(ask_ranks), methods=["POST"]),
        Route("/v1/models", list_models, methods=["GET"]),
        Route("/v1/models/{model:path}", show_model, methods=["GET"]),
        Route("/tokenize", tokenize, methods=["POST"]),
        Route("/detokenize", detokenize, methods=["POST"]),
        Route("/tokenizer_info", show_tokenizer, methods=["GET"]),
        Route("/openapi.json", openapi, methods=["GET"]),
        Route("/health/live", live, methods=["GET"]),
        Route("/health/ready", ready, methods=["GET"]),
        Route("/version", show_version, methods=["GET"]),
        Route("/metrics", show_metrics, methods=["GET"]),
        Route("/v1/admin/keys/{name}/limits", show_limits, methods=["GET"]),
        Route("/v1/admin/keys/{name}/limits", change_limits, methods=["PUT"]),
        Route("/v1/adapters", list_adapters, methods=["GET"]),
        Route("/v1/adapters/{name}", load_adapter, methods=["PUT"]),
        Route("/v1/adapters/{name}", unload_adapter, methods=["DELETE"]),
    ]


def _second_paths(routes: Sequence[BaseRoute]) -> list[BaseRoute]:
    """Return further paths of endpoints in `routes`, which are logged and counted under their first path."""
    endpoints = {route.path: route.endpoint for route in routes if isinstance(route, Route)}
    return [
        Route(path, endpoints[first], methods=methods, include_in_schema=False)
        for path, first, methods in (
            ("/score", "/v1/score", ["POST"]),
            ("/rerank", "/v1/rerank", ["POST"]),
            ("/health", "/health/ready", ["GET"]),
            ("/ping", "/health/ready", ["GET", "POST"]),
        )
    ]


def _for_pages(settings: ServerSettings) -> list[Middleware]:
    """Return the middleware by which pages of the allowed origins may read answers, refusals included."""
    if not settings.allowed_origins:
        return []
    origins = [origin.lower().rstrip("/") for origin in settings.allowed_origins]
    exposed = ["x-request-id", "retry-after"]
    methods = ["GET", "POST", "PUT", "DELETE"]
    return [
        Middleware(
            CORSMiddleware, allow_origins=origins, allow_methods=methods, allow_headers=["*"], expose_headers=exposed
        )
    ]


@asynccontextmanager
async def _lifespan(app: Starlette) -> AsyncIterator[None]:
    service: Service = app.state.service
    try:
        service.engine.info  # noqa: B018 - raises unless it is open
    except EngineStopped:
        async with service.engine:
            async with _serving(service):
                yield
    else:
        async with _serving(service):
            yield


@asynccontextmanager
async def _serving(service: Service) -> AsyncIterator[None]:
    await service.load_adapters()
    service.warn_of_template()
    with Watchdog(service):
        yield


async def _told(request: Request, error: Exception) -> Response:
    return error_response(as_api_error(error), request.scope)


async def _nobody(request: Request, error: Exception) -> Response:
    return Response(status_code=499)  # the client has gone: nobody reads it


async def _http_error(request: Request, error: Exception) -> Response:
    """Answer what the router itself refuses: unknown paths and methods."""
    assert isinstance(error, HTTPException)
    code, message = {
        404: ("not_found", "there is no such endpoint; GET /openapi.json describes all"),
        405: ("method_not_allowed", "this endpoint does not take that method"),
    }.get(error.status_code, ("http_error", "the request was refused"))
    return error_response(ApiError(error.status_code, code, message, headers=error.headers), request.scope)
