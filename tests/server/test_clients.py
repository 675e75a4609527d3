"""What the clients that people bring expect: paths, sentences that they look for, and words that they show."""

from __future__ import annotations

import re
from typing import Any

import httpx2
import pytest
from serving import CAPACITY, Serving, check_error, scripted, serving, until

from headrace.server import ServerSettings

CHAT = "/v1/chat/completions"
MOST = CAPACITY.max_context
SENTENCE = "This model's maximum context length is 1024 tokens. However, you requested "


# -- paths ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", ["/health", "/ping"])
def test_health_is_where_charts_and_load_generators_ask(path: str) -> None:
    with serving(scripted(), ServerSettings(api_keys={"a": "a-key-of-tests"})) as server:
        with httpx2.Client(base_url=server.url, trust_env=False) as client:  # which has no key
            assert client.get(path).json() == client.get("/health/ready").json() == {"status": "ready"}
            assert client.get("/version").status_code == 401
            server.service.drain()
            answers = [client.get(each) for each in (path, "/health/ready")]
            assert [(each.status_code, each.json()["reason"]) for each in answers] == [(503, "draining")] * 2
        assert server.client.get("/version").json().keys() == {"version"}
        # Metrics and the log know one name of each; what came without a key is "other".
        until(lambda: {key[1] for key in _counted(server)} == {"/health/ready", "/version", "other"})


def _counted(server: Serving) -> list[tuple[str, str, str]]:
    return list(server.service.telemetry.recorder.http)


@pytest.mark.parametrize(
    ("path", "body"),
    [("/score", {"text_1": "ab", "text_2": ["c", "d"]}), ("/rerank", {"query": "ab", "documents": ["c", "d"]})],
)
def test_scores_and_ranks_beside_their_versioned_paths(server: Serving, path: str, body: dict[str, Any]) -> None:
    found, versioned = server.post(body, path), server.post(body, f"/v1{path}")
    assert found.status_code == 200, found.text
    varying = ("id", "created")
    assert {key: value for key, value in found.json().items() if key not in varying} == {
        key: value for key, value in versioned.json().items() if key not in varying
    }


# -- the context ----------------------------------------------------------------------------------------------------


def chat(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


LONG = "a" * MOST
TOO_LONG: list[tuple[str, dict[str, Any], str, str]] = [
    (CHAT, {"messages": chat(LONG)}, "messages", "messages"),
    (CHAT, {"messages": chat(LONG), "max_tokens": 5}, "messages", "messages"),
    (CHAT, {"messages": chat("ab"), "max_tokens": MOST}, "max_tokens", "messages"),
    (CHAT, {"messages": chat("ab"), "max_completion_tokens": MOST}, "max_completion_tokens", "messages"),
    ("/v1/completions", {"prompt": LONG}, "prompt", "prompt"),
    ("/v1/completions", {"prompt": ["a", LONG]}, "prompt[1]", "prompt[1]"),
    ("/v1/completions", {"prompt": "ab", "max_tokens": MOST}, "max_tokens", "prompt"),
    ("/v1/responses", {"input": LONG}, "input", "input"),
    ("/v1/responses", {"input": "ab", "max_output_tokens": MOST}, "max_output_tokens", "input"),
    ("/v1/embeddings", {"input": LONG + "a"}, "input", "input"),
    ("/v1/embeddings", {"input": ["a", LONG + "a"]}, "input[1]", "input[1]"),
    ("/v1/rerank", {"query": "a", "documents": ["a", LONG + "a"]}, "documents[1]", "documents[1]"),
]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("path", "body", "param", "where"), TOO_LONG)
def test_the_context_is_refused_in_the_words_of_openai(
    server: Serving, path: str, body: dict[str, Any], param: str, where: str, stream: bool
) -> None:
    generates = path in (CHAT, "/v1/completions", "/v1/responses")
    error = check_error(server.post(body | ({"stream": stream} if generates else {}), path), 400)
    assert (error["code"], error["param"]) == ("context_length_exceeded", param)
    assert error["message"].startswith(SENTENCE)
    said = re.fullmatch(
        r"(\d+) tokens \((\d+) in (?:the )?(\S+), (\d+) in the completion\)\. Please reduce the length of .*\.",
        error["message"].removeprefix(SENTENCE),
    )
    assert said is not None, error
    asked = body.get("max_tokens") or body.get("max_completion_tokens") or body.get("max_output_tokens")
    assert int(said[1]) == int(said[2]) + int(said[4]) > MOST
    assert int(said[4]) == (asked or int(generates)) and said[3] == where


@pytest.mark.parametrize(
    ("path", "name", "value"),
    [
        (CHAT, "messages", chat(9 * LONG)),
        ("/v1/completions", "prompt", 9 * LONG),
        ("/v1/embeddings", "input", 9 * LONG),
    ],
)
def test_a_text_that_is_not_even_tokenized_is_refused_in_the_same_words(
    server: Serving, path: str, name: str, value: Any
) -> None:
    error = check_error(server.post({name: value}, path), 400, "context_length_exceeded")
    assert error["param"] == name and error["message"].startswith(f"{SENTENCE}more than that: {name}: ")


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ({"messages": chat(LONG), "max_tokens": 5}, r"prompt is too long: \d+ tokens > 1024 maximum"),
        (
            {"messages": chat("ab"), "max_tokens": MOST},
            r"input length and `max_tokens` exceed context limit: \d+ .*",
        ),
    ],
)
def test_messages_refuse_the_context_in_the_words_of_anthropic(server: Serving, body: Any, said: str) -> None:
    answer = server.post(body, "/v1/messages")
    assert answer.status_code == 400 and answer.json()["error"]["type"] == "invalid_request_error"
    assert re.fullmatch(said, answer.json()["error"]["message"]), answer.text
