"""/v1/embeddings, /v1/score and /v1/rerank: the official client's types, limits, refusals and disconnects.

The refusals of vectors are row 34 of the acceptance list (test_acceptance.py).
"""

from __future__ import annotations

import base64
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import openai
import pytest
from openai.types import CreateEmbeddingResponse
from serving import CAPACITY, Serving, check_error, scripted, serving, until

from headrace.engine.testing import ScriptedRunner, scripted_vector
from headrace.server import KeyLimits, ServerSettings

PATHS = {
    "/v1/embeddings": {"input": "ab"},
    "/v1/score": {"text_1": "ab", "text_2": ["c", "d"]},
    "/v1/rerank": {"query": "ab", "documents": ["c", "d"]},
}


@pytest.fixture(scope="module")
def server() -> Iterator[Serving]:
    with serving(scripted(), ServerSettings(max_inputs=40)) as here:
        yield here


@pytest.fixture(scope="module")
def client(server: Serving) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none-needed", max_retries=0) as made:
        yield made


def unit(text: str | list[int]) -> Any:
    vector = scripted_vector(list(text.encode()) if isinstance(text, str) else text)
    return vector / np.linalg.norm(vector)


@pytest.mark.parametrize(
    ("given", "texts"),
    [
        ("ab", ["ab"]),
        (["ab", "c" * 300, "é"], ["ab", "c" * 300, "é"]),
        ([1, 2, 3], [[1, 2, 3]]),
        ([[1], [2, 3]], [[1], [2, 3]]),
    ],
)
def test_vectors_come_as_numbers_and_in_base64(
    server: Serving, client: openai.OpenAI, given: Any, texts: list[Any]
) -> None:
    packed = client.embeddings.create(model="scripted", input=given)  # which asks for base64 by itself
    plain = client.embeddings.create(model="scripted", input=given, encoding_format="float")
    short = client.embeddings.create(model="scripted", input=given, dimensions=3)
    for place, text in enumerate(texts):
        assert np.allclose(packed.data[place].embedding, unit(text), atol=1e-6)
        assert np.allclose(packed.data[place].embedding, plain.data[place].embedding, atol=1e-7)
        cut = unit(text)[:3]
        assert np.allclose(short.data[place].embedding, cut / np.linalg.norm(cut), atol=1e-6)
        assert packed.data[place].index == place
    used = sum(len(text.encode()) if isinstance(text, str) else len(text) for text in texts)
    assert packed.usage.prompt_tokens == packed.usage.total_tokens == used
    raw = server.post({"input": given}, "/v1/embeddings").json()
    CreateEmbeddingResponse.model_validate(raw, strict=True)
    raw = server.post({"input": given, "encoding_format": "base64"}, "/v1/embeddings").json()
    assert len(base64.b64decode(raw["data"][0]["embedding"])) == 4 * 8


def test_scores_and_ranks_are_of_the_same_vectors(server: Serving) -> None:
    documents = ["c", "d", "ab", "e"]
    expected = [float(unit("ab") @ unit(document)) for document in documents]
    whole = server.post({"text_1": "ab", "text_2": documents}, "/v1/score").json()
    assert [each["score"] for each in whole["data"]] == pytest.approx(expected, abs=1e-6)
    assert [each["index"] for each in whole["data"]] == [0, 1, 2, 3]
    assert server.post({"text_1": "ab", "text_2": "c"}, "/v1/score").json()["data"][0]["score"] == pytest.approx(
        expected[0]
    )
    best = sorted(range(4), key=lambda place: -expected[place])
    found = server.post({"query": "ab", "documents": documents, "top_n": 3}, "/v1/rerank").json()
    assert [each["index"] for each in found["results"]] == best[:3] and best[0] == 2
    assert [each["document"]["text"] for each in found["results"]] == [documents[place] for place in best[:3]]
    assert found["usage"] == {"prompt_tokens": 7, "total_tokens": 7}
    objects = [{"text": document} for document in documents]
    bare = server.post({"query": "ab", "documents": objects, "return_documents": False}, "/v1/rerank").json()
    assert [each["index"] for each in bare["results"]] == best
    assert all(each.keys() == {"index", "relevance_score"} for each in bare["results"])


REFUSED: list[tuple[str, dict[str, Any], str | None, str]] = [
    ("/v1/embeddings", {"input": ["a"] * 41}, "input", "invalid_value"),
    ("/v1/embeddings", {"input": ""}, "input", "empty_prompt"),
    ("/v1/embeddings", {"input": ["a", ""]}, "input[1]", "empty_prompt"),
    ("/v1/embeddings", {"input": []}, "input", "empty_prompt"),
    ("/v1/embeddings", {"input": [1, 257]}, "input[1]", "token_out_of_range"),
    ("/v1/embeddings", {"input": [2**70]}, "input[0]", "token_out_of_range"),
    ("/v1/embeddings", {"input": [[1], [2, 257]]}, "input[1][1]", "token_out_of_range"),
    ("/v1/embeddings", {"input": ["a", "b" * 1025]}, "input[1]", "context_length_exceeded"),
    ("/v1/embeddings", {"input": [[1], ["a"]]}, "input[1]", "invalid_type"),
    ("/v1/embeddings", {"input": {"text": "a"}}, "input", "invalid_type"),
    ("/v1/embeddings", {"input": "a", "dimensions": 9}, "dimensions", "invalid_value"),
    ("/v1/embeddings", {"input": "a", "dimensions": 0}, "dimensions", "invalid_value"),
    ("/v1/embeddings", {"input": "a", "encoding_format": "hex"}, "encoding_format", "invalid_value"),
    ("/v1/embeddings", {"input": "a" * 1025}, "input", "context_length_exceeded"),
    ("/v1/embeddings", {"input": "a", "priority": -1}, "priority", "invalid_value"),
    ("/v1/embeddings", {}, "input", "missing_required_parameter"),
    ("/v1/embeddings", {"input": "a", "model": "other"}, "model", "model_not_found"),
    ("/v1/score", {"text_1": "a", "text_2": []}, "text_2", "invalid_value"),
    ("/v1/score", {"text_1": "a", "text_2": ["b", 3]}, "text_2[1]", "invalid_type"),
    ("/v1/score", {"text_1": "", "text_2": ["b"]}, "text_1", "invalid_value"),
    ("/v1/score", {"text_1": "a", "text_2": ["b", "c" * 1025]}, "text_2[1]", "context_length_exceeded"),
    ("/v1/score", {"text_1": "a", "text_2": "c" * 1025}, "text_2", "context_length_exceeded"),
    ("/v1/score", {"text_1": "a" * 1025, "text_2": ["b"]}, "text_1", "context_length_exceeded"),
    ("/v1/rerank", {"query": "a" * 9000, "documents": ["b"]}, "query", "context_length_exceeded"),
    ("/v1/rerank", {"query": "a", "documents": ["b"] * 41}, "documents", "invalid_value"),
    ("/v1/rerank", {"query": "a", "documents": [{"image": "b"}]}, "documents[0]", "invalid_type"),
    ("/v1/rerank", {"query": "a", "documents": ["b", ""]}, "documents[1]", "empty_prompt"),
    ("/v1/rerank", {"query": "a", "documents": ["b"], "top_n": 0}, "top_n", "invalid_value"),
]


@pytest.mark.parametrize(("path", "body", "param", "code"), REFUSED)
def test_34_what_cannot_be_done_is_refused(
    server: Serving, path: str, body: dict[str, Any], param: str | None, code: str
) -> None:
    error = check_error(server.post(body, path), 404 if code == "model_not_found" else 400, code)
    assert error["param"] == param
    if code == "context_length_exceeded":
        assert error["message"].startswith("This model's maximum context length is 1024 tokens. ")
    if param is not None and code == "token_out_of_range":
        assert error["message"].startswith(f"{param}: ") and error["message"].count(":") == 1


def test_what_is_too_long_may_be_cut(server: Serving) -> None:
    asked = {"input": ["a" * 2000, "b" * 9000], "truncate_prompt_tokens": -1}
    answer = server.post(asked, "/v1/embeddings")
    assert answer.status_code == 200, answer.text
    found = answer.json()
    assert found["usage"]["prompt_tokens"] == 2 * 1024
    assert np.allclose(found["data"][0]["embedding"], unit("a" * 1024), atol=1e-6)


def test_a_key_is_charged_with_what_was_computed() -> None:
    limits = KeyLimits(tokens_per_minute=100)
    settings = ServerSettings(api_keys={"one": "a-key-of-tests"}, key_limits={"one": limits})
    with serving(scripted(), settings) as server:
        assert server.post({"input": "a" * 60}, "/v1/embeddings").status_code == 200
        # Too long to be tokenised at all, so that nothing is charged.
        assert server.post({"input": "é" * 200_000}, "/v1/embeddings").status_code == 400
        assert server.post({"text_1": "a" * 60, "text_2": "b"}, "/v1/score").status_code == 200
        refused = server.post({"input": "a"}, "/v1/embeddings")
        assert refused.status_code == 429 and int(refused.headers["retry-after"]) >= 1
        assert server.client.post("/v1/embeddings", headers={"authorization": "Bearer wrong"}).status_code == 401


@pytest.mark.parametrize("path", PATHS)
def test_a_client_that_goes_away_cancels_its_request(path: str) -> None:
    gate = threading.Event()
    with serving(scripted(lambda: ScriptedRunner(CAPACITY, gate=lambda: gate.wait(10) and None))) as server:
        with pytest.raises(Exception, match="(?i)time"):
            server.post(PATHS[path], path, timeout=0.3)
        until(lambda: not server.service.running)
        gate.set()
        until(lambda: not server.stats().pages_held and not server.stats().running)
        assert server.post(PATHS[path], path).status_code == 200


def test_a_request_ends_in_its_time_and_when_the_server_drains() -> None:
    gate = threading.Event()
    runner = lambda: ScriptedRunner(CAPACITY, gate=lambda: gate.wait(10) and None)  # noqa: E731
    with serving(scripted(runner)) as server:
        late = server.post({"input": "ab"}, "/v1/embeddings", headers={"x-request-timeout": "0.2"})
        check_error(late, 503, "deadline_exceeded")
        answers: list[Any] = []
        asking = threading.Thread(target=lambda: answers.append(server.post({"input": "ab"}, "/v1/embeddings")))
        asking.start()
        until(lambda: server.service.running)
        server.portal.call(server.service.drain)
        assert server.post({"input": "ab"}, "/v1/embeddings").status_code == 503
        server.portal.call(server.service.end_all)
        asking.join()
        check_error(answers[0], 503, "server_shutting_down")
        gate.set()


@contextmanager
def asking(server: Serving, body: dict[str, Any], key: str = "one") -> Iterator[list[Any]]:
    """A request for vectors in a thread of its own; its answer is in the list once the block has ended."""
    answers: list[Any] = []
    headers = {"authorization": f"Bearer {KEYS[key]}"}
    thread = threading.Thread(
        target=lambda: answers.append(server.post(body, "/v1/embeddings", headers=headers, timeout=30))
    )
    thread.start()
    try:
        yield answers
    finally:
        thread.join()


KEYS = {"one": "a-key-of-tests", "other": "another-key-of-tests"}
TWO_ROWS = replace(CAPACITY, max_rows=2)


@contextmanager
def held_up(**settings: Any) -> Iterator[tuple[Serving, threading.Event]]:
    """A server for two keys whose device has two rows and ends no step before the event is set."""
    gate = threading.Event()
    engine = scripted(lambda: ScriptedRunner(TWO_ROWS, gate=lambda: gate.wait(10) and None), capacity=TWO_ROWS)
    with serving(engine, ServerSettings(api_keys=KEYS, **settings)) as server:
        try:
            yield server, gate
        finally:
            gate.set()


def ask(server: Serving, body: dict[str, Any], key: str = "one") -> Any:
    return server.post(body, "/v1/embeddings", headers={"authorization": f"Bearer {KEYS[key]}"})


def test_38_what_no_step_takes_up_in_time_is_refused_and_costs_what_was_tokenised() -> None:
    limits = {"other": KeyLimits(tokens_per_minute=100)}
    with held_up(queue_timeout=0.6, key_limits=limits) as (server, gate):
        with asking(server, {"input": ["ab", "cd"]}) as answers:
            until(lambda: server.stats().running == 1)
            waited = ask(server, {"input": "e" * 320}, "other")
            check_error(waited, 503, "queue_timeout")
            assert 1 <= int(waited.headers["retry-after"]) <= 30
            gate.set()
        assert answers[0].status_code == 200  # it ran all the while
        assert server.stats().prompt_tokens == 4  # what was refused was never prefilled
        assert ask(server, {"input": "e" * 90}, "other").status_code == 429  # 320 of 100 tokens were made of its text


def test_what_waits_is_bounded_until_a_step_takes_it_up() -> None:
    with held_up(max_queue=1) as (server, gate):
        with asking(server, {"input": ["a"] * 40}) as first:
            until(lambda: server.stats().running == 1)
            until(lambda: not server.service.limits._queue.choices)  # the rest of it is let in as rows become free
            with asking(server, {"input": "b"}, "other") as second:
                until(lambda: server.service.limits._queue.choices == 1)
                check_error(ask(server, {"input": "c"}), 503, "server_overloaded")
                gate.set()
        assert first[0].status_code == second[0].status_code == 200


def test_answers_have_room_of_which_a_key_gets_half() -> None:
    body = {"input": ["a"] * 8, "encoding_format": "float"}
    with held_up(max_answer_bytes=50_000) as (server, gate):
        with asking(server, body) as answers:
            until(lambda: server.service.running)
            check_error(ask(server, body), 429, "rate_limit_exceeded")
            check_error(ask(server, {"input": ["a"] * 40}, "other"), 503, "server_overloaded")
            gate.set()
        assert answers[0].status_code == 200
        assert ask(server, body).status_code == 200


def test_a_key_is_charged_about_right_while_its_vectors_are_computed() -> None:
    limits = {"one": KeyLimits(tokens_per_minute=100)}
    with held_up(key_limits=limits) as (server, gate):
        with asking(server, {"input": "a" * 200}) as first:
            until(lambda: server.stats().running == 1)
            with asking(server, {"input": "b" * 100}) as second:  # the first counts for 50 as yet
                until(lambda: len(server.service.running) == 2)
                gate.set()
        assert first[0].status_code == second[0].status_code == 200
        check_error(ask(server, {"input": "a"}), 429, "rate_limit_exceeded")  # a token of this tokenizer is a byte
