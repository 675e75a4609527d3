"""`create_app` as an application of others: mounted, with an engine that somebody else opened, or its own lifespan."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from starlette.applications import Starlette
from starlette.routing import Mount
from starlette.testclient import TestClient

from headrace.engine import Engine, EngineStopped
from headrace.engine.bench.host.fake_device import FAKE_LETTER, FakeEngine
from headrace.server import ServerSettings, create_app

SETTINGS = ServerSettings(
    allowed_hosts=("testserver",), api_keys={"me": "the-key-of-tests"}, metrics_key="the-reader-of-tests"
)
READER = {"authorization": "Bearer the-reader-of-tests"}
KEY = {"authorization": "Bearer the-key-of-tests"}


def mounted(engine: Engine) -> Starlette:
    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        async with engine:
            yield

    return Starlette(routes=[Mount("/llm", create_app(engine, SETTINGS))], lifespan=lifespan)


@pytest.mark.parametrize("prefix", ["", "/llm"])
def test_alone_and_mounted(prefix: str) -> None:
    engine = FakeEngine()
    app = mounted(engine) if prefix else create_app(engine, SETTINGS)
    with TestClient(app) as client:
        assert client.get(f"{prefix}/health/ready").json() == {"status": "ready"}
        assert client.get(f"{prefix}/v1/models").status_code == 401
        assert 'src="page/main.js"' in client.get(f"{prefix}/").text  # relative: it is found below the mount as well
        assert client.get(f"{prefix}/page/main.js").status_code == 200
        assert client.put(f"{prefix}/v1/admin/keys/me/limits", json={}, headers=KEY).status_code == 403
        assert client.get(f"{prefix}/metrics", headers=KEY).status_code == 403
        assert client.get(f"{prefix}/metrics", headers=READER).text.count("headrace:ready 1.0") == 1
        body = {"model": "fake", "prompt": "x", "max_tokens": 5}
        answer = client.post(f"{prefix}/v1/completions", json=body, headers=KEY)
        assert answer.json()["choices"][0]["text"] == 5 * FAKE_LETTER
        with client.stream("POST", f"{prefix}/v1/completions", json=body | {"stream": True}, headers=KEY) as stream:
            assert stream.read().count(FAKE_LETTER.encode()) == 5
    with pytest.raises(EngineStopped):
        engine.stats()


def test_a_server_whose_engine_is_closed_says_so() -> None:
    client = TestClient(create_app(FakeEngine(), SETTINGS))
    assert client.get("/health/live").status_code == 200
    assert client.get("/health/ready").json() == {"status": "not ready", "reason": "EngineStopped"}
    refused = client.post("/v1/completions", json={"model": "fake", "prompt": "x"}, headers=KEY)
    assert refused.status_code == 503 and refused.json()["error"]["code"] == "server_shutting_down"
