"""Keys beside each other: what a refused request costs its key, and what a format that waits too long is told."""

from __future__ import annotations

import threading
from dataclasses import replace
from typing import Any

import httpx2
import pytest
from serving import CAPACITY, Serving, serving, until

from headrace.engine.grammar import compiler as grammars
from headrace.engine.grammar import trials as grammar_trials
from headrace.engine.life.opened import Opened
from headrace.engine.testing import ByteTokenizer, ScriptedEngine
from headrace.server import KeyLimits, ServerSettings

FULL = 1_000_000
ENDLESS = {"type": "integer", "multipleOf": 99_999_989}


class FormatEngine(ScriptedEngine):
    """A scripted engine that takes response formats, which its device does not look at."""

    def _open(self) -> Opened:
        opened = super()._open()
        return replace(opened, abilities=opened.abilities | {"grammar"})


def keys(**changes: Any) -> ServerSettings:
    return ServerSettings(
        api_keys={"ann": "ann-secret", "bob": "bob-secret"},
        default_limits=KeyLimits(tokens_per_minute=FULL),
        **changes,
    )


def spent(server: Serving, name: str = "ann") -> float:
    """Tokens that a key has used, to within what comes back while a test runs slowly."""
    until(lambda: server.portal.call(lambda: not server.service.running))  # charged behind the answer, in one go
    account = server.service.limits._accounts[name]
    account.limits = KeyLimits(tokens_per_minute=None)  # from now on nothing comes back
    used, account.tokens = FULL - account.tokens, float(FULL)
    return used


def formatted(schema: Any, **fields: Any) -> dict[str, Any]:
    wanted = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    return {"prompt": "Hi", "max_tokens": 2, "response_format": wanted} | fields


def test_a_refused_prompt_costs_what_was_tokenised_and_nothing_where_it_was_not() -> None:
    with serving(ScriptedEngine(CAPACITY), keys()) as server:
        server.post({"prompt": "warm", "max_tokens": 1})
        spent(server)
        answer = server.post({"prompt": "x" * 5000, "max_tokens": 1})
        assert (answer.status_code, answer.json()["error"]["code"]) == (400, "context_length_exceeded")
        assert spent(server) == 5000
        answer = server.post({"prompt": "x" * 1000, "max_tokens": 100})
        assert answer.status_code == 400 and "maximum context length" in answer.json()["error"]["message"]
        assert spent(server) == 1000
        for untokenised in ("x" * 6000, [7] * 5000):
            assert server.post({"prompt": untokenised, "max_tokens": 1}).status_code == 400
            assert spent(server) == 0
        assert server.post({"prompt": "x" * 100, "max_tokens": 5, "ignore_eos": True}).status_code == 200
        assert spent(server) == 105


def test_a_refused_text_for_a_vector_costs_what_was_tokenised() -> None:
    with serving(ScriptedEngine(CAPACITY), keys()) as server:
        server.post({"prompt": "warm", "max_tokens": 1})
        spent(server)
        answer = server.post({"input": "x" * 5000}, "/v1/embeddings")
        assert answer.status_code == 400, answer.text
        assert spent(server) == 5000
        assert server.post({"input": "x" * 6000}, "/v1/embeddings").status_code == 400
        assert spent(server) == 0


def test_a_failed_trial_counts_against_the_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammar_trials, "_SECONDS", 0.25)
    with serving(FormatEngine(CAPACITY), keys()) as server:
        server.post({"prompt": "warm", "max_tokens": 1})
        spent(server)
        answer = server.post(formatted(ENDLESS))
        assert answer.status_code == 400 and "takes longer than 0.25 s" in answer.json()["error"]["message"]
        assert spent(server) == 250 + len("Hi")


def test_a_format_that_waits_too_long_is_503_with_retry_after_and_costs_the_text_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(grammars, "_PATIENCE", -1.0)
    with serving(FormatEngine(CAPACITY), keys()) as server:
        server.post({"prompt": "warm", "max_tokens": 1})
        spent(server)
        answer = server.post(formatted({"type": "object"}))
        assert answer.status_code == 503, answer.text
        assert int(answer.headers["retry-after"]) >= 1
        assert answer.json()["error"]["code"] == "server_overloaded"
        assert spent(server) == len("Hi")


class Slow(ByteTokenizer):
    """Takes as long as it is told to for a text, in the helper's thread."""

    def __init__(self) -> None:
        super().__init__()
        self.begun, self.go_on = threading.Event(), threading.Event()

    def encode(self, text: str, *, framed: bool = True) -> list[int]:
        if len(text) > 2048:
            self.begun.set()
            self.go_on.wait(20)
        return super().encode(text, framed=framed)


class SlowEngine(ScriptedEngine):
    """A scripted engine whose tokenizer waits."""

    def __init__(self) -> None:
        super().__init__(replace(CAPACITY, max_context=8192, num_pages=1024))
        self.slow = Slow()

    def _open(self) -> Opened:
        return replace(super()._open(), tokenizer=self.slow)


LONG = "x" * 4000
LEAVING: dict[str, tuple[str, dict[str, Any]]] = {
    "completions": ("/v1/completions", {"prompt": LONG, "max_tokens": 1}),
    "chat": ("/v1/chat/completions", {"messages": [{"role": "user", "content": LONG[7:]}], "max_tokens": 1}),
    "embeddings": ("/v1/embeddings", {"input": LONG}),
    "tokenize": ("/tokenize", {"prompt": LONG}),
}


@pytest.mark.parametrize("name", LEAVING)
def test_who_times_out_while_a_text_is_tokenised_pays_for_it(name: str) -> None:
    path, body = LEAVING[name]
    engine = SlowEngine()
    with serving(engine, keys(request_timeout=0.3)) as server:
        server.post({"prompt": "warm", "max_tokens": 1})
        spent(server)
        answer = server.post(body, path)
        assert answer.status_code == 503, answer.text
        assert engine.slow.begun.is_set()
        assert spent(server) == 0
        engine.slow.go_on.set()
        until(lambda: server.service.limits._accounts["ann"].tokens < FULL)
        assert spent(server) == 4000


@pytest.mark.parametrize("name", ["completions", "tokenize"])
def test_who_leaves_while_a_text_is_tokenised_pays_for_it(name: str) -> None:
    path, body = LEAVING[name]
    engine = SlowEngine()
    with serving(engine, keys()) as server:
        server.post({"prompt": "warm", "max_tokens": 1})
        spent(server)
        with pytest.raises(httpx2.TimeoutException):
            server.post(body, path, timeout=0.3)
        assert engine.slow.begun.is_set()
        engine.slow.go_on.set()
        until(lambda: server.service.limits._accounts["ann"].tokens < FULL)
        assert spent(server) == 4000


def test_tokenising_and_detokenising_cost_a_token_each() -> None:
    with serving(ScriptedEngine(CAPACITY), keys()) as server:
        server.post({"prompt": "warm", "max_tokens": 1})
        spent(server)
        assert server.post({"prompt": "x" * 900}, "/tokenize").json()["count"] == 900
        assert spent(server) == 900
        assert server.post({"tokens": [65] * 700}, "/detokenize").json() == {"prompt": "A" * 700}
        assert spent(server) == 700


def test_a_trial_costs_its_time_where_it_finds_no_fault_and_where_nobody_waits_for_it() -> None:
    slow = {"type": "integer", "multipleOf": 20_011}
    with serving(FormatEngine(CAPACITY), keys()) as server:
        server.post({"prompt": "warm", "max_tokens": 1})
        spent(server)
        answer = server.post(formatted(slow))
        assert answer.status_code in (200, 400), answer.text
        assert spent(server) > len("Hi") + 2
        with pytest.raises(httpx2.TimeoutException):
            server.post(formatted(ENDLESS), timeout=0.5)
        until(lambda: server.service.limits._accounts["ann"].tokens < FULL - len("Hi"))
        until(lambda: server.service.limits._accounts["ann"].tokens < FULL - 100)
        assert spent(server) < 2100
