"""Answers are what the official schemas say, to the last key; and what judges them everywhere notices what is wrong."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from official import judge_body, judge_stream
from pydantic import ValidationError
from serving import Serving, scripted, serving

pytest.importorskip("openai", minversion="3")

HELLO: Any = [{"role": "user", "content": "Hello?"}]
ASKED: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": HELLO, "max_tokens": 4, "n": 2},
    "/v1/completions": {"prompt": ["a", "b"], "max_tokens": 4, "echo": True},
    "/v1/responses": {"input": "Hello?", "max_output_tokens": 4, "instructions": "x", "prompt_cache_key": "k"},
    "/v1/messages": {"messages": HELLO, "max_tokens": 4, "system": "x"},
}


@pytest.mark.parametrize("path", ASKED)
@pytest.mark.parametrize("cut", [True, False])
def test_answers_and_events_have_every_required_key(server: Serving, path: str, cut: bool) -> None:
    body = ASKED[path] | {"ignore_eos": cut}
    whole = server.post(body, path)
    judge_body(path, whole.status_code, whole.json())
    judge_stream(path, server.post(body | {"stream": True}, path).text)
    for wrong in ({"temperature": 9}, {"model": "other"}):
        refused = server.post(body | wrong, path)
        judge_body(path, refused.status_code, refused.json())


def test_models_and_vectors_are_what_the_schemas_say(server: Serving) -> None:
    for path in ("/v1/models", "/v1/models/scripted"):
        judge_body(path, 200, server.client.get(path).json())
    judge_body("/v1/embeddings", 200, server.post({"input": ["a", "b"]}, "/v1/embeddings").json())


def test_a_response_says_when_it_was_completed_and_repeats_what_was_asked(server: Serving) -> None:
    asked = {"input": "x", "max_output_tokens": 3, "ignore_eos": True, "safety_identifier": "s", "user": "u"}
    cut = server.post(asked, "/v1/responses").json()
    assert cut["status"] == "incomplete" and cut["completed_at"] is None
    assert (cut["safety_identifier"], cut["user"], cut["prompt_cache_key"]) == ("s", "u", None)
    assert (cut["presence_penalty"], cut["frequency_penalty"], cut["top_logprobs"]) == (0.0, 0.0, 0)


@pytest.mark.parametrize(
    ("path", "spoil"),
    [
        ("/v1/responses", lambda body: body.pop("completed_at")),
        ("/v1/responses", lambda body: body.pop("temperature")),
        ("/v1/responses", lambda body: body.update(status="done")),
        ("/v1/responses", lambda body: body["output"].append({"type": "poem", "id": "x"})),
        ("/v1/responses", lambda body: body.update(mood="fine")),
        ("/v1/responses", lambda body: body["usage"].update(input_tokens="3")),
        ("/v1/messages", lambda body: body.pop("stop_details")),
        ("/v1/messages", lambda body: body["usage"].pop("cache_creation")),
        ("/v1/messages", lambda body: body.update(stop_reason="tired")),
        ("/v1/messages", lambda body: body["content"].append({"type": "poem"})),
        ("/v1/chat/completions", lambda body: body["choices"][0]["message"].pop("refusal")),
        ("/v1/chat/completions", lambda body: body["choices"][0].pop("logprobs")),
        ("/v1/completions", lambda body: body["choices"][0].update(score=1)),
    ],
)
def test_the_judge_notices(server: Serving, path: str, spoil: Any) -> None:
    good = server.post(ASKED[path], path).json()
    judge_body(path, 200, good)
    bad = copy.deepcopy(good)
    spoil(bad)
    with pytest.raises((AssertionError, ValidationError)):
        judge_body(path, 200, bad)


def test_every_server_of_the_tests_is_judged_when_it_stops(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headrace.server.routes.models._model", lambda service: {"id": "scripted", "object": "model"})
    with pytest.raises(AssertionError, match="/v1/models answered 200"):
        with serving(scripted()) as server:
            assert server.client.get("/v1/models").status_code == 200
