"""The field `speculate` of requests: whether drafts are verified for them, and in no way what they answer."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from serving import Serving, serving
from tiny_models import chat_folder
from websockets.sync.client import connect

from headrace.engine import Engine
from headrace.engine.scheduling.speculation.depth import DepthRule
from headrace.engine.speculation import Ngram
from headrace.server import ServerSettings

ASKED: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "one two one two one two"},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "one two one two one two"}]},
    "/v1/responses": {"input": "one two one two one two"},
    "/v1/messages": {"messages": [{"role": "user", "content": "one two one two one two"}]},
}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(DepthRule, "choose", lambda self, rows, context: 4)
        model = chat_folder(tmp_path_factory.mktemp("speculate"))
        engine = Engine(model, device="cpu", cpu_threads=1, kv_memory="1MiB", speculation=Ngram(longest=2))
        with serving(engine, ServerSettings(served_model_name="tiny")) as here:
            yield here


def body_of(path: str, **more: Any) -> dict[str, Any]:
    limit = "max_output_tokens" if path == "/v1/responses" else "max_tokens"
    return {"model": "tiny", "temperature": 0, "ignore_eos": True, limit: 40, **ASKED[path], **more}


def answer_of(server: Serving, path: str, **more: Any) -> Any:
    answer = server.post(body_of(path, **more), path)
    assert answer.status_code == 200, answer.text
    body = answer.json()
    if path == "/v1/responses":
        return [part["text"] for each in body["output"] for part in each["content"]]
    return body.get("choices") or body["content"]


@pytest.mark.parametrize("path", ASKED)
def test_requests_over_http_may_go_without(server: Serving, path: str) -> None:
    before = server.stats().drafted_tokens
    plain = answer_of(server, path, speculate=False)
    assert server.stats().drafted_tokens == before
    assert answer_of(server, path, speculate=True) == plain
    with_drafts = server.stats().drafted_tokens
    assert with_drafts > before
    assert answer_of(server, path) == plain
    assert server.stats().drafted_tokens > with_drafts, "requests speculate unless they say otherwise"
    refused = server.post(body_of(path, speculate="no"), path)
    assert refused.status_code == 400 and "speculate" in refused.json()["error"]["message"]


def test_requests_over_websocket_may_go_without(server: Serving) -> None:
    path = "/v1/chat/completions"
    with connect(f"ws://127.0.0.1:{server.port}{path}", proxy=None) as socket:

        def ask(**more: Any) -> str:
            request = body_of(path, stream=False, **more)
            socket.send(json.dumps({"type": "request", "id": "a", "request": request}))
            whole, done = json.loads(socket.recv(timeout=10)), json.loads(socket.recv(timeout=10))
            assert (whole["type"], done["type"]) == ("completion", "done")
            return str(whole["data"]["choices"][0]["message"]["content"])

        before = server.stats().drafted_tokens
        plain = ask(speculate=False)
        assert server.stats().drafted_tokens == before
        assert ask() == plain
        assert server.stats().drafted_tokens > before


def test_the_field_is_documented(server: Serving) -> None:
    paths = server.client.get("/openapi.json").json()
    for path in ASKED:
        content = paths["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]
        shape = paths["components"]["schemas"][content["$ref"].rsplit("/", 1)[-1]]
        assert shape["properties"]["speculate"]["anyOf"][0] == {"type": "boolean"}, path
