"""The OpenAPI document is about every route and true: schemathesis finds no 5xx and no answer that it does not name."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from typing import Any

import hypothesis
import jsonschema
import pytest
import schemathesis
import tiny_models
from hypothesis import strategies as st
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
    status_code_conformance,
)
from serving import Serving, events_of, scripted, serving
from starlette.applications import Starlette
from starlette.routing import Mount, Route
from starlette.testclient import TestClient

from headrace.engine import Engine
from headrace.server import ServerSettings, create_app

KEY = "the-key-of-tests"
OPERATIONS = 26
EXAMPLES = int(os.environ.get("HEADRACE_EXAMPLES", "30"))
"""Requests of each operation and kind, the same in every run; `make soak` sends 100."""
PASSING = {"model": "scripted", "messages": [{"role": "user", "content": "ab"}], "prompt": "ab", "name": "a"}
CHECKS = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    """A tiny real model, which can do all that the CPU can."""
    folder = tiny_models.whole_folder(tmp_path_factory.mktemp("tiny"))
    (folder / "chat_template.jinja").write_text("{% for m in messages %}<{{ m.content }}>{% endfor %}")
    settings = ServerSettings(
        served_model_name="scripted", admin_keys={"boss": KEY}, api_keys={"a": "a-key-of-tests"}, max_choices=4
    )
    with serving(Engine(folder, kv_memory="16MiB", dtype="float32"), settings) as here:
        here.client.headers["authorization"] = f"Bearer {KEY}"
        yield here


@pytest.fixture(scope="module")
def document(server: Serving) -> dict[str, Any]:
    found: dict[str, Any] = server.client.get("/openapi.json").json()
    return found


def test_the_document_is_valid_and_about_every_route(server: Serving, document: dict[str, Any]) -> None:
    schemathesis.openapi.from_dict(document).validate()
    generating = ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages")
    routes = {(path, "POST") for path in generating}  # applications of their own
    for route in create_app(scripted()).routes:
        if isinstance(route, Route) and route.include_in_schema:
            routes |= {(route.path, method) for method in route.methods or ()}
    documented = {(path, method.upper()) for path, methods in document["paths"].items() for method in methods}
    assert {(re.sub(r":path\}", "}", path), method) for path, method in routes if method != "HEAD"} == documented
    assert len(documented) == OPERATIONS
    schemas = document["components"]["schemas"]
    assert schemas["ChatFields"]["properties"]["logit_bias"] and "data" in schemas["ModelList"]["properties"]


@pytest.mark.rotated(2)
@pytest.mark.parametrize("mode", [GenerationMode.POSITIVE, GenerationMode.NEGATIVE])
@pytest.mark.parametrize("place", range(OPERATIONS))
def test_no_answer_is_undocumented(server: Serving, document: dict[str, Any], place: int, mode: GenerationMode) -> None:
    schema = schemathesis.openapi.from_dict(document)
    operation = [found.ok() for found in schema.get_all_operations()][place]
    if mode == GenerationMode.NEGATIVE and not (operation.body or operation.path_parameters):
        return  # there is nothing in it that could be wrong

    @hypothesis.settings(
        max_examples=EXAMPLES,
        deadline=None,
        derandomize=True,
        database=None,
        phases=[hypothesis.Phase.generate],
        suppress_health_check=list(hypothesis.HealthCheck),
    )
    @hypothesis.given(case=operation.as_strategy(generation_mode=mode), deep=st.booleans())
    def check(case: Any, deep: bool) -> None:
        for part in (case.body, case.path_parameters) if deep else ():  # past what nearly nothing drawn would pass
            if isinstance(part, dict):
                part.update({name: value for name, value in PASSING.items() if name in part})
        headers = {"authorization": f"Bearer {KEY}"}
        case.call_and_validate(base_url=server.url, headers=headers, timeout=30, checks=CHECKS)

    check()
    server.check()


EVENTS = [
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "ab"}], "logprobs": True, "top_logprobs": 2}),
    ("/v1/completions", {"prompt": ["ab", "c"], "logprobs": 2, "echo": True, "n": 2}),
]


@pytest.mark.parametrize(("path", "body"), EVENTS)
@pytest.mark.parametrize("usage", [False, True])
def test_events_are_as_documented(
    server: Serving, document: dict[str, Any], path: str, body: dict[str, Any], usage: bool
) -> None:
    content = document["paths"][path]["post"]["responses"]["200"]["content"]
    schema = {**content["text/event-stream"]["schema"]["x-event"], "components": document["components"]}
    options = {"stream": True, "max_tokens": 6, "stream_options": {"include_usage": usage}}
    *chunks, done = events_of(server.post(body | options, path).text)
    assert done == "[DONE]" and len(chunks) >= 2  # tokens may have come together
    for chunk in chunks:
        jsonschema.validate(chunk, schema)
    whole = server.post(body | {"max_tokens": 6}, path).json()
    jsonschema.validate(whole, {**content["application/json"]["schema"], "components": document["components"]})


FORMS = [
    ("/v1/responses", {"input": "ab", "max_output_tokens": 6, "instructions": "c"}),
    ("/v1/messages", {"messages": [{"role": "user", "content": "ab"}], "max_tokens": 6}),
]


@pytest.mark.parametrize(("path", "body"), FORMS)
def test_other_forms_of_chats_are_as_documented(
    server: Serving, document: dict[str, Any], path: str, body: dict[str, Any]
) -> None:
    content = document["paths"][path]["post"]["responses"]["200"]["content"]
    components = {"components": document["components"]}
    schema = content["text/event-stream"]["schema"]["x-event"] | components
    blocks = server.post(body | {"stream": True}, path).text.strip().split("\n\n")
    assert len(blocks) > 4
    for block in blocks:
        jsonschema.validate(json.loads(block.partition("data: ")[2]), schema)
    jsonschema.validate(server.post(body, path).json(), content["application/json"]["schema"] | components)
    errors = document["paths"][path]["post"]["responses"]["400"]["content"]["application/json"]["schema"]
    jsonschema.validate(server.post(body | {"temperature": 3}, path).json(), errors | components)


def test_keys_and_mounting_show_in_it(document: dict[str, Any]) -> None:
    assert document["paths"]["/v1/models"]["get"]["security"] == [{"key": []}]
    assert document["paths"]["/health/live"]["get"]["security"] == []
    app = create_app(scripted(), ServerSettings(allowed_hosts=("testserver",)))
    mounted = TestClient(Starlette(routes=[Mount("/llm", app)])).get("/llm/openapi.json").json()
    assert mounted["servers"] == [{"url": "/llm"}] and "securitySchemes" not in mounted["components"]
    assert "401" not in json.dumps(mounted)
