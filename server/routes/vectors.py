"""POST /v1/embeddings, /v1/score and /v1/rerank: from a body to the engine's vectors or scores, and their answers."""

from __future__ import annotations

import base64
import secrets
from collections.abc import Callable
from typing import Any

import orjson
from anyio import Event
from anyio.lowlevel import checkpoint
from starlette.types import Receive, Scope, Send

from headrace.engine import Charge, Scores
from headrace.server.http.body import ClientGone
from headrace.server.http.connection import Connection
from headrace.server.protocol.completions import prompts_of
from headrace.server.protocol.vectors import (
    EmbeddingFields,
    RerankFields,
    ScoreFields,
    document_texts,
    parse_vectors,
    ranked,
    usage_of,
)
from headrace.server.routes.generation import take_body, timeout_of
from headrace.server.service import Service
from headrace.server.vectors import VectorAsk, Vectors, Worked

__all__ = ["VectorRoute", "ask_embeddings", "ask_ranks", "ask_scores"]

_FLOAT_BYTES, _BASE64_BYTES, _NUMBER_BYTES = 4, 6, 14  # an element in memory, and as it is shown
_ENTRY_BYTES = 2048  # a text that waits in the engine, with its entry in the answer, but without its vector


class VectorRoute:
    """An endpoint that computes without generating, as an ASGI application."""

    def __init__(self, ask: Callable[[Service, dict[str, Any]], VectorAsk]) -> None:
        """Serve the `VectorAsk` that `ask` makes of a body."""
        self._ask = ask

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        service: Service = scope["app"].state.service
        try:
            body = await take_body(service, scope, receive)
        except ClientGone:
            return
        ask, timeout = self._ask(service, body), timeout_of(scope)
        connection = Connection(receive, send, stall_timeout=service.settings.stall_timeout)
        vectors = Vectors(service, ask, connection, scope, timeout)
        await connection.run(vectors.answer, vectors.tick)


def ask_embeddings(service: Service, body: dict[str, Any]) -> VectorAsk:
    """Return the `VectorAsk` of a request for vectors.

    Raises:
        ApiError: The body asks for nothing that can be done.
    """
    fields = parse_vectors(EmbeddingFields, body, service.settings)
    adapter = service.adapter_of(fields.model, fields.adapter)
    texts = prompts_of(fields.input, service.settings.max_inputs, "input")

    async def work(tenant: str, started: Event, charge: Charge) -> Worked:
        found = await service.engine.embed(
            texts,
            dimensions=fields.dimensions,
            truncate=fields.truncates,
            adapter=adapter,
            tenant=tenant,
            priority=fields.priority or 0,
            started=started,
            charge=charge,
        )
        parts = [b'{"object":"list","data":[']
        for index, vector in enumerate(found.vectors):
            if fields.encoding_format == "base64":
                shown: Any = base64.b64encode(vector.astype("<f4").tobytes()).decode()
            else:
                shown = vector
            one = {"object": "embedding", "index": index, "embedding": shown}
            separator = b"," if index else b""
            parts.append(separator + orjson.dumps(one, option=orjson.OPT_SERIALIZE_NUMPY))
            await checkpoint()  # each vector has thousands of numbers
        used = found.usage.prompt_tokens
        parts.append(b"]," + orjson.dumps({"model": fields.model, "usage": usage_of(used)})[1:])
        return Worked(parts, found.usage)

    names = {"prompt": "input", "prompts": "input", "pooling": "model"}
    several = isinstance(fields.input, list) and isinstance(fields.input[0], str | list)
    elements = min(fields.dimensions or 2**31, service.engine.info.embedding_size)
    shown_bytes = _BASE64_BYTES if fields.encoding_format == "base64" else _NUMBER_BYTES
    return VectorAsk(
        texts=texts,
        adapter=adapter,
        priority=fields.priority or 0,
        work=work,
        size=len(texts) * (_ENTRY_BYTES + elements * (_FLOAT_BYTES + shown_bytes)),
        names=names,
        several=several,
    )


def ask_scores(service: Service, body: dict[str, Any]) -> VectorAsk:
    """Return the `VectorAsk` of a request for scores.

    Raises:
        ApiError: The body asks for nothing that can be done.
    """
    fields = parse_vectors(ScoreFields, body, service.settings)
    adapter = service.adapter_of(fields.model, fields.adapter)
    documents = document_texts(fields.text_2, "text_2", service.settings.max_inputs)

    async def work(tenant: str, started: Event, charge: Charge) -> Worked:
        found = await _score(service, fields.text_1, documents, fields, adapter, tenant, started, charge)
        data = [
            {"index": index, "object": "score", "score": score} for index, score in enumerate(found.scores.tolist())
        ]
        head = {"id": f"score-{secrets.token_hex(16)}", "object": "list", "created": service.now()}
        whole = head | {"model": fields.model, "data": data, "usage": usage_of(found.usage.prompt_tokens)}
        return Worked([orjson.dumps(whole)], found.usage)

    names = {"query": "text_1", "documents": "text_2", "prompt": "text_2", "pooling": "model"}
    return VectorAsk(
        texts=[fields.text_1, *documents],
        adapter=adapter,
        priority=fields.priority or 0,
        work=work,
        size=len(documents) * _ENTRY_BYTES,
        names=names,
        several=isinstance(fields.text_2, list),
    )


def ask_ranks(service: Service, body: dict[str, Any]) -> VectorAsk:
    """Return the `VectorAsk` of a request to rank documents.

    Raises:
        ApiError: The body asks for nothing that can be done.
    """
    fields = parse_vectors(RerankFields, body, service.settings)
    adapter = service.adapter_of(fields.model, fields.adapter)
    documents = document_texts(fields.documents, "documents", service.settings.max_inputs)

    async def work(tenant: str, started: Event, charge: Charge) -> Worked:
        found = await _score(service, fields.query, documents, fields, adapter, tenant, started, charge)
        scores, results = found.scores.tolist(), []
        for place in ranked(scores, fields.top_n):
            result: dict[str, Any] = {"index": place, "relevance_score": scores[place]}
            if fields.return_documents is not False:
                result["document"] = {"text": documents[place]}
            results.append(result)
        whole = {"id": f"rerank-{secrets.token_hex(16)}", "model": fields.model, "results": results}
        return Worked([orjson.dumps(whole | {"usage": usage_of(found.usage.prompt_tokens)})], found.usage)

    names = {"prompt": "documents", "pooling": "model"}
    return VectorAsk(
        texts=[fields.query, *documents],
        adapter=adapter,
        priority=fields.priority or 0,
        work=work,
        size=len(documents) * _ENTRY_BYTES + sum(map(len, documents)),
        names=names,
        several=isinstance(fields.documents, list),
    )


async def _score(
    service: Service,
    query: str,
    documents: list[str],
    fields: ScoreFields | RerankFields,
    adapter: str | None,
    tenant: str,
    started: Event,
    charge: Charge,
) -> Scores:
    return await service.engine.score(
        query,
        documents,
        truncate=fields.truncates,
        adapter=adapter,
        tenant=tenant,
        priority=fields.priority or 0,
        started=started,
        charge=charge,
    )
