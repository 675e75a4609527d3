"""A Starlette application with the engine in its lifespan; a client that goes away cancels its request.

    python examples/starlette_app.py [model folder or .gguf file]
    curl -N localhost:8000/generate -d '{"prompt": [{"role": "user", "content": "Why is the sky blue?"}]}'

`prompt` is text, a list of token ids or a list of messages; every other key is a field of `SamplingParams`.
"""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import asdict
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

from headrace.engine import Engine, Rejected, SamplingParams, TokenStream
from headrace.server.demo import demo_model


def make_app(model: str, **options: Any) -> Starlette:
    """An application that opens `model` when it starts and returns its memory when it stops."""

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[dict[str, Engine]]:
        async with Engine(model, **options) as engine:
            yield {"engine": engine}  # Starlette puts it on request.state

    routes = [Route("/generate", generate, methods=["POST"]), Route("/stats", stats)]
    return Starlette(routes=routes, lifespan=lifespan)


async def generate(request: Request) -> Response:
    engine: Engine = request.state.engine
    try:
        body = await request.json()
        if not isinstance(body, dict):
            raise ValueError("the body must be a JSON object")
        stream = engine.stream(body.pop("prompt", ""), SamplingParams(**{"max_tokens": 256, **body}))
        await stream.admitted()  # a refusal becomes a status line, because nothing has been sent yet
    except (Rejected, ValueError) as refusal:
        return PlainTextResponse(f"{refusal}\n", status_code=422)
    return StreamingResponse(texts(stream), media_type="text/plain; charset=utf-8")


async def texts(stream: TokenStream) -> AsyncIterator[str]:
    """The stream's text; when the client goes away, Starlette cancels this, and the block cancels the request."""
    async with stream:
        async for chunk in stream.chunks():
            yield chunk.text


async def stats(request: Request) -> Response:
    engine: Engine = request.state.engine
    return JSONResponse(asdict(engine.stats()))


def main(model: str) -> None:
    """Serve on port 8000 until interrupted; running answers get five seconds to end."""
    uvicorn.run(make_app(model, kv_memory="256MiB"), port=8000, timeout_graceful_shutdown=5)


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else str(demo_model()))
