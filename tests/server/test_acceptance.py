"""The acceptance list of the server: what goes in, what must come out; tests carry the number of their row.

Each row also leaves a server that answers another request within a second and holds no page of the first, and an error
body that names no path or address.

`ELSEWHERE` says where the rows are that are not here. Those of refusals, disconnects, failures and drain for the other
forms of chats are in test_responses.py and test_messages.py.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import json
import re
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx2
import psutil
import pytest
from leftovers import settle
from serving import CAPACITY, Process, Serving, check_error, events_of, scripted, serving, until

from headrace.engine.bench.host.fake_device import FakeEngine
from headrace.engine.scheduling.plan import Capacity
from headrace.engine.scheduling.result import NoToken
from headrace.engine.testing import ScriptedRunner
from headrace.server import KeyLimits, ServerSettings
from headrace.server.protocol.chat import ChatMessage

KEY = "the-key-of-tests"
CHAT_PATH = "/v1/chat/completions"
MESSAGES = [{"role": "user", "content": "Hi"}]
ENDLESS = {"prompt": "endless", "max_tokens": 900, "ignore_eos": True, "stream": True}


@pytest.fixture(scope="module")
def shared() -> Iterator[Serving]:
    with serving(scripted()) as here:
        yield here


@pytest.fixture
def server(shared: Serving) -> Iterator[Serving]:
    yield shared
    shared.check()


@pytest.fixture(scope="module")
def guarded() -> Iterator[Serving]:
    with serving(scripted(), ServerSettings(api_keys={"me": KEY}, admin_keys={"boss": "the-boss-of-tests"})) as here:
        yield here


def head(body: bytes = b"", *lines: bytes, path: bytes = b"/v1/completions", length: bool = True) -> bytes:
    """A request by hand."""
    all_lines = [b"POST " + path + b" HTTP/1.1", b"Host: localhost", b"Content-Type: application/json", *lines]
    if length:
        all_lines.append(b"Content-Length: %d" % len(body))
    return b"\r\n".join([*all_lines, b"", body])


def status_of(answer: bytes) -> int:
    return int(answer.split(b" ", 2)[1]) if answer.startswith(b"HTTP/") else 0


# -- what is no request ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", ["/v1/completions", CHAT_PATH, "/v1/responses", "/tokenize"])
@pytest.mark.parametrize("body", ["", "[]", '"x"', "null", "1"])
def test_01_a_body_that_is_no_object(server: Serving, path: str, body: str) -> None:
    error = check_error(server.post(body, path), 400)
    assert error["code"] in ("invalid_json", "invalid_type") and error["type"] == "invalid_request_error"


@pytest.mark.parametrize(
    "body",
    [
        b'{"model": "scripted", "prompt": "x", "temperature": NaN}',
        b'{"model": "scripted", "prompt": "x", "temperature": 1e400}',
        b'{"model": "scripted", "prompt": "\\ud800"}',
        b'{"model": "scripted", "prompt": "\xff"}',
        b'{"model": "scripted", "prompt": "x"} tail',
        b'{"prompt": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
        b'{"prompt": ' + b"[" * 100 + b"]" * 100 + b"}",
        b'{"a":' * 70 + b"1" + b"}" * 70,
    ],
)
def test_02_a_body_that_is_no_json(server: Serving, body: bytes) -> None:
    answer = server.client.post("/v1/completions", content=body, headers={"content-type": "application/json"})
    check_error(answer, 400, "invalid_json")


@pytest.mark.parametrize(
    "headers",
    [
        {"content-type": "text/plain"},
        {"content-type": ""},
        {"content-type": "multipart/form-data; boundary=x"},
        {"content-type": "application/x-www-form-urlencoded"},
        {"content-type": "application/json", "content-encoding": "gzip"},
    ],
)
def test_03_another_type_of_body(server: Serving, headers: dict[str, str]) -> None:
    check_error(server.client.post("/v1/completions", content=b"{}", headers=headers), 415)


def test_04_a_body_that_is_too_large(server: Serving) -> None:
    limit = server.service.settings.max_body_bytes
    settle()
    before = psutil.Process().memory_info().rss
    announced = server.raw(head(b"", b"Content-Length: %d" % (limit + 1), length=False))
    assert status_of(announced) == 413 and b"connection: close" in announced.lower()
    part = b"10000\r\n" + b" " * 0x10000 + b"\r\n"
    chunked = server.raw(head(b"", b"Transfer-Encoding: chunked", length=False) + part * (2 * limit // 0x10000))
    assert status_of(chunked) in (0, 413)  # 0: the answer was lost in the reset of what we still sent
    assert psutil.Process().memory_info().rss - before < 16 * limit  # the client and its data live here, too


@pytest.mark.parametrize(
    ("request_bytes", "statuses"),
    [
        (b"GET / HTTP/1.1\r\nHost: localhost\r\nX: " + b"a" * 20_000_000 + b"\r\n\r\n", (400, 431)),
        (b"GET / HTTP/1.1\r\nHost: localhost\r\n" + b"a: b\r\n" * 100_000 + b"\r\n", (400, 431)),
        (b"GET /" + b"a" * 20_000_000 + b" HTTP/1.1\r\nHost: localhost\r\n\r\n", (400, 414)),
        (b"GET /" + b"a" * 10_000 + b" HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n", (414,)),
        (b"GET / HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nX: " + b"a" * 40_000 + b"\r\n\r\n", (431,)),
    ],
    ids=["header", "headers", "url", "long url", "long header"],
)
def test_05_heads_that_are_too_large(server: Serving, request_bytes: bytes, statuses: tuple[int, ...]) -> None:
    assert status_of(server.raw(request_bytes)) in (*statuses, *((0,) if len(request_bytes) > 10**6 else ()))


def test_06_a_client_that_is_too_slow() -> None:
    with serving(scripted(), ServerSettings(body_timeout=0.3)) as server:
        server.server.config.http.keywords["header_timeout"] = 0.3
        began = time.monotonic()
        assert server.raw(b"POST /v1/completions HTTP/1.1\r\nHost: loc") == b""
        assert server.raw(b"") == b""
        slow = server.raw(head(b"{", b"Content-Length: 100", length=False))
        assert time.monotonic() - began < 4
        assert status_of(slow) == 408
        server.check()


def _answer(sock: socket.socket) -> bool:
    """Whether the answer to /health/live comes."""
    found = b""
    while not found.endswith(b'"live"}'):
        found += sock.recv(65536)
    return status_of(found) == 200


def test_06_a_body_that_nobody_reads_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its request is answered by the head alone; what follows must end in time, and is thrown away up to a limit."""
    monkeypatch.setattr("headrace.server.http.running._HEADER_TIMEOUT", 1.0)
    request = b"GET /health/live HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n"
    with serving(scripted()) as server:
        with socket.create_connection(("127.0.0.1", server.port), timeout=10) as short:
            short.sendall(request % 2)
            assert _answer(short)
            short.sendall(b"ab" + request % 0)  # what ends in time leaves a connection that goes on
            assert _answer(short)
        with socket.create_connection(("127.0.0.1", server.port), timeout=10) as slow:
            slow.sendall(request % 10**9)
            assert _answer(slow)
            began = time.monotonic()
            with pytest.raises(ConnectionError):
                while time.monotonic() - began < 5:
                    slow.sendall(b"x")
                    time.sleep(0.05)
            assert 0.5 < time.monotonic() - began < 3
        with socket.create_connection(("127.0.0.1", server.port), timeout=10) as fast:
            fast.sendall(request % 10**9)
            assert _answer(fast)
            with pytest.raises(ConnectionError):
                for _ in range(64):
                    fast.sendall(bytes(2**20))
        until(lambda: not server.server.server_state.connections)


@pytest.mark.parametrize(
    "lines",
    [
        (b"Content-Length: 2", b"Transfer-Encoding: chunked"),
        (b"Content-Length: 2", b"Content-Length: 3"),
        (b"Content-Length: -1",),
        (b"Content-Length: 2x",),
        (b"Transfer-Encoding: gzip, chunked",),
    ],
)
def test_07_bodies_of_two_lengths(server: Serving, lines: tuple[bytes, ...]) -> None:
    answer = server.raw(head(b"{}", *lines, length=False), seconds=1.0)
    assert status_of(answer) in (400, 501) and b"connection: close" in answer.lower()


def test_07_a_million_tiny_chunks(server: Serving) -> None:
    answer = server.raw(head(b"", b"Transfer-Encoding: chunked", length=False) + b"1\r\n \r\n" * 1_000_000, seconds=20)
    assert status_of(answer) in (0, 400, 413)


def test_08_unknown_endpoints_and_methods(server: Serving) -> None:
    wrong = server.client.get("/v1/completions")
    check_error(wrong, 405, "method_not_allowed")
    assert wrong.headers["allow"] == "POST"
    check_error(server.client.get("/v1/nothing"), 404, "not_found")
    check_error(server.client.get("/v1/models/"), 404)


# -- who asks -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"authorization": "Bearer wrong-key-entirely"},
        {"authorization": f"Bearer {KEY}x"},
        {"authorization": f"Bearer {KEY[:-1]}"},
        {"authorization": KEY},
        {"authorization": f"Basic {KEY}"},
        {"authorization": f"Bearer Bearer {KEY}"},
        {"authorization": "Bearer"},
        {"authorization": ""},
        {"x-api-key": f"Bearer {KEY}"},
        {"x-api-key": ""},
        [("x-api-key", KEY), ("authorization", f"Bearer {KEY}")],
        [("authorization", f"Bearer {KEY}"), ("authorization", f"Bearer {KEY}")],
    ],
)
def test_09_nobody_without_a_key(guarded: Serving, headers: Any) -> None:
    with httpx2.Client(base_url=guarded.url, trust_env=False) as client:
        for path in ("/v1/models", f"/v1/models?api_key={KEY}", "/v1/nothing", "/openapi.json", "/page/load"):
            answer = client.get(path, headers=headers)
            check_error(answer, 401, "invalid_api_key")
            assert answer.headers["www-authenticate"] == "Bearer"
        assert client.get("/health/live").status_code == client.get("/health/ready").status_code == 200


def test_09_every_route_needs_a_key_but_the_public_ones(guarded: Serving) -> None:
    from starlette.routing import Route

    from headrace.server.http.gate import ADMIN_PATHS, PUBLIC_PATHS
    from headrace.server.routes.page import ASSETS

    routes = [route for route in guarded.server.config.app.routes if isinstance(route, Route)]
    assert len(routes) > 8
    with httpx2.Client(base_url=guarded.url, trust_env=False) as client:
        for route in routes:
            for method in route.methods or ():
                path = route.path.replace("{model:path}", "m").replace("{name}", "me")
                expected = 200 if path in PUBLIC_PATHS or path in ASSETS else 401
                assert client.request(method, path).status_code == expected, (method, path)
                if path.startswith(ADMIN_PATHS):
                    assert guarded.client.request(method, path).status_code == 403


@pytest.mark.parametrize("host", ["x/health?y=", "evil.example", "localhost.evil.example", "", "localhost:80:80", "@"])
def test_10_forged_hosts(server: Serving, host: str) -> None:
    answer = server.raw(f"GET /v1/models HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n".encode())
    assert status_of(answer) in (400, 403)


def test_10_origins_of_pages(server: Serving) -> None:
    answer = server.client.get("/v1/models", headers={"origin": "https://evil.example"})
    assert "--allowed-origins" in check_error(answer, 403, "origin_not_allowed")["message"]
    answer = server.client.get("/v1/models", headers={"host": "evil.example"})
    assert "--allowed-hosts" in check_error(answer, 403, "host_not_allowed")["message"]
    with serving(scripted(), ServerSettings(allowed_origins=("https://good.example",))) as other:
        assert other.client.get("/v1/models", headers={"origin": "https://good.example"}).status_code == 200


def test_10_pages_of_an_allowed_origin_may_fetch() -> None:
    origin = {"origin": "https://good.example"}
    settings = ServerSettings(api_keys={"me": KEY}, allowed_origins=("https://Good.example/",))
    with serving(scripted(), settings) as server:
        ask = {"access-control-request-method": "POST", "access-control-request-headers": "authorization,content-type"}
        url = server.url + CHAT_PATH
        preflight = httpx2.options(url, headers=origin | ask, trust_env=False)  # browsers send no key with it
        assert preflight.status_code == 200
        assert preflight.headers["access-control-allow-origin"] == "https://good.example"
        assert "POST" in preflight.headers["access-control-allow-methods"]
        assert "authorization" in preflight.headers["access-control-allow-headers"].lower()
        answer = server.post({"prompt": "x"}, headers=origin)
        refused = httpx2.post(url, headers=origin, trust_env=False)
        for each, status in ((answer, 200), (refused, 401)):
            assert each.status_code == status
            assert each.headers["access-control-allow-origin"] == "https://good.example"
        evil = httpx2.options(url, headers=ask | {"origin": "https://evil.example"}, trust_env=False)
        assert evil.status_code >= 400 and "access-control-allow-origin" not in evil.headers


# -- fields ---------------------------------------------------------------------------------------------------------

Bad = tuple[dict[str, Any], str | None, str | None]

BAD_CHATS: list[tuple[str, Bad]] = [
    ("11", ({"model": "other"}, "model", "model_not_found")),
    ("11", ({"model": None}, "model", "invalid_type")),
    ("11", ({"model": ""}, "model", None)),
    ("12", ({"messages": []}, "messages", None)),
    ("12", ({"messages": "hi"}, "messages", "invalid_type")),
    ("12", ({"messages": [1]}, "messages[0]", "invalid_type")),
    ("12", ({"messages": [{"role": "king", "content": "x"}]}, "messages[0].role", None)),
    ("12", ({"messages": [{"content": "x"}]}, "messages[0].role", "missing_required_parameter")),
    ("12", ({"messages": [{"role": "user", "content": None}]}, "messages[0].content", None)),
    ("12", ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content", "invalid_type")),
    ("12", ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content[0]", None)),
    ("17", ({"max_tokens": 0}, "max_tokens", None)),
    ("17", ({"max_tokens": -1}, "max_tokens", None)),
    ("17", ({"max_tokens": 2**63}, "max_tokens", None)),
    ("17", ({"max_tokens": "5"}, "max_tokens", "invalid_type")),
    ("17", ({"max_completion_tokens": True}, "max_completion_tokens", "invalid_type")),
    ("18", ({"n": 0}, "n", None)),
    ("18", ({"n": 17}, "n", None)),
    ("18", ({"n": 129}, "n", None)),
    ("18", ({"n": 10**9}, "n", None)),
    ("18", ({"best_of": 10**6}, "best_of", None)),
    ("18", ({"n": 2, "best_of": 1}, "best_of", None)),
    ("19", ({"temperature": -1}, "temperature", None)),
    ("19", ({"temperature": 2.1}, "temperature", None)),
    ("19", ({"top_p": 0}, "top_p", None)),
    ("19", ({"top_p": 1.1}, "top_p", None)),
    ("19", ({"top_k": -2}, "top_k", None)),
    ("19", ({"min_p": 2}, "min_p", None)),
    ("19", ({"seed": 2**63}, "seed", None)),
    ("20", ({"presence_penalty": 2.1}, "presence_penalty", None)),
    ("20", ({"frequency_penalty": -2.1}, "frequency_penalty", None)),
    ("21", ({"logit_bias": {"300": 1}}, "logit_bias", None)),
    ("21", ({"logit_bias": {"abc": 1}}, "logit_bias", None)),
    ("21", ({"logit_bias": {"5": 101}}, "logit_bias", None)),
    ("22", ({"stop": ["a", "b", "c", "d", "e"]}, "stop", None)),
    ("22", ({"stop": ""}, "stop[0]", None)),
    ("22", ({"stop": ["a", ""]}, "stop[1]", None)),
    ("22", ({"stop": "a" * 10_240}, "stop[0]", None)),
    ("22", ({"stop": ["abc"] * 500_000}, "stop", None)),
    ("23", ({"stop_token_ids": [257]}, "stop_token_ids", None)),
    ("23", ({"stop_token_ids": [-1]}, None, None)),
    ("23", ({"stop_token_ids": [2**40]}, None, None)),
    ("23", ({"stop_token_ids": list(range(200))}, "stop_token_ids", None)),
    ("24", ({"logprobs": 3}, "logprobs", None)),
    ("24", ({"top_logprobs": 21}, "top_logprobs", None)),
    ("24", ({"top_logprobs": 10**9, "logprobs": True}, None, None)),
    ("27", ({"stream_options": {"include_usage": True}}, "stream_options", None)),
    ("28", ({"response_format": {"type": "poem"}}, "response_format.type", None)),
    ("28", ({"response_format": {"type": "json_schema"}}, "response_format", None)),
    ("29", ({"tools": [{"type": "function", "function": {"name": "f"}}] * 2}, "tools", None)),
    ("29", ({"tools": [{"type": "function", "function": {"name": "f" * 65}}]}, "tools[0].function.name", None)),
    ("29", ({"tools": [{"type": "function", "function": {"name": f"f{i}"}} for i in range(129)]}, "tools", None)),
    ("29", ({"tools": [], "tool_choice": {"type": "function", "function": {"name": "g"}}}, "tool_choice", None)),
    ("29", ({"tools": "f"}, "tools", "invalid_type")),
    ("30", ({"chat_template": "{{ 1 }}"}, "chat_template", "unsupported_parameter")),
    ("30", ({"chat_template_kwargs": {"tokenize": True}}, "chat_template_kwargs.tokenize", "invalid_value")),
    ("35", ({"cache_salt": ""}, "cache_salt", None)),
    ("35", ({"cache_salt": "s" * 4096}, "cache_salt", None)),
    ("35", ({"cache_salt": "a\0b"}, "cache_salt", None)),
    ("1.1", ({"custom_logit_processor": "x"}, "custom_logit_processor", "unsupported_parameter")),
    ("1.1", ({"prompt_embeds": "x"}, "prompt_embeds", "unsupported_parameter")),
]


@pytest.mark.parametrize(
    ("bad"), [bad for _, bad in BAD_CHATS], ids=[f"row{row}-{i}" for i, (row, _) in enumerate(BAD_CHATS)]
)
@pytest.mark.parametrize("stream", [False, True])
def test_11_to_35_chats_that_are_refused(server: Serving, bad: Bad, stream: bool) -> None:
    changes, param, code = bad
    began = time.monotonic()
    answer = server.post(
        {"messages": MESSAGES, "stream": stream and "stream_options" not in changes} | changes, CHAT_PATH
    )
    assert time.monotonic() - began < 5.0
    error = check_error(answer, 404 if code == "model_not_found" else 400, code)
    assert error["type"] == "invalid_request_error"
    if param is not None:
        assert error["param"] == param


def test_11_a_missing_model_or_prompt(server: Serving) -> None:
    missing = check_error(server.post(json.dumps({"prompt": "x"})), 400, "missing_required_parameter")
    assert missing["param"] == "model"
    assert check_error(server.post({}), 400, "missing_required_parameter")["param"] == "prompt"
    assert check_error(server.post({}, CHAT_PATH), 400, "missing_required_parameter")["param"] == "messages"


@pytest.mark.parametrize(
    "prompt", ["", [], [[]], [""], ["a", ""], [1, "a"], ["a", 1], [["a"]], [None], None, 5, {}, [{}]]
)
def test_13_prompts_that_are_none(server: Serving, prompt: Any) -> None:
    error = check_error(server.post({"prompt": prompt}), 400)
    assert error["code"] in ("empty_prompt", "invalid_type") and error["param"].startswith("prompt")


@pytest.mark.parametrize("token", [-1, 257, 2**31, 2**63, 1.5, True])
def test_14_token_ids_out_of_range(server: Serving, token: Any) -> None:
    assert check_error(server.post({"prompt": [1, token]}), 400, "token_out_of_range")["param"] == "prompt[1]"
    error = check_error(server.post({"prompt": [[1], [2, token]], "stream": True}), 400, "token_out_of_range")
    assert error["param"] == "prompt[1][1]" and error["message"].startswith("prompt[1][1]: ")
    assert check_error(server.post({"tokens": [token]}, "/detokenize"), 400)["param"] == "tokens[0]"


def test_15_the_limit_of_the_context(server: Serving) -> None:
    most = CAPACITY.max_context
    for length, count in [(most, 1), (most + 1, 1), (most - 4, 5), (most - 1, 2)]:
        body = {"prompt": ["a", "a" * length], "max_tokens": count}
        assert check_error(server.post(body), 400, "context_length_exceeded")["param"] in ("prompt[1]", "max_tokens")
        error = check_error(server.post({"prompt": "a" * length, "max_tokens": count}), 400, "context_length_exceeded")
        assert str(length) in error["message"] and str(most) in error["message"]
    assert server.post({"prompt": "a" * (most - 1), "max_tokens": 1}).status_code == 200
    assert server.post({"prompt": "a" * (most - 5)}).status_code == 200  # the default length is cut, not refused


def test_16_a_word_of_two_megabytes(server: Serving) -> None:
    with concurrent.futures.ThreadPoolExecutor() as pool:
        long = pool.submit(server.post, {"prompt": "a" * 2_000_000})
        began = time.monotonic()
        assert server.client.get("/health/ready").status_code == 200
        assert time.monotonic() - began < 3.0
        check_error(long.result(), 400, "context_length_exceeded")


BIG = {
    "empty lists": ("/v1/completions", {"prompt": [[]] * 900_000}),
    "detokenize texts": ("/detokenize", {"tokens": [""] * 900_000}),
    "detokenize ids": ("/detokenize", {"tokens": [1] * 1_500_000}),
    "tokenize messages": ("/tokenize", {"messages": [{}] * 900_000}),
    "tools": (CHAT_PATH, {"messages": MESSAGES, "tools": [1] * 1_500_000}),
    "echo": ("/v1/completions", {"prompt": [65] * 1_200_000, "echo": True}),
}


@pytest.mark.parametrize("name", BIG)
def test_16_a_large_body_holds_nobody_up(server: Serving, name: str) -> None:
    path, body = BIG[name]
    text = json.dumps({"model": "scripted", **body}, separators=(",", ":")).encode()
    assert 2_000_000 < len(text) < 4 * 2**20
    slowest = 0.0
    with concurrent.futures.ThreadPoolExecutor() as pool:
        long = pool.submit(server.client.post, path, content=text, headers={"content-type": "application/json"})
        while not long.done():
            began = time.monotonic()
            assert server.client.get("/health/live").status_code == 200
            slowest = max(slowest, time.monotonic() - began)
    assert check_error(long.result(), 400)["param"] is not None
    assert slowest < 1.0


def test_16_tokenizing_counts_among_the_requests_of_a_key() -> None:
    with serving(scripted(), ServerSettings(key_limits={"anonymous": KeyLimits(concurrency=0)})) as here:
        check_error(here.post({"prompt": "a"}, "/tokenize"), 429, "rate_limit_exceeded")


@pytest.mark.parametrize(
    "fields",
    [
        {"max_tokens": None},
        {"temperature": 1e-45},
        {"temperature": 0},
        {"top_k": -1},
        {"stop": None},
        {"stream": True, "stream_options": None},
        {"presence_penalty": 0, "frequency_penalty": 0.0, "logit_bias": {}, "logprobs": None, "best_of": 1},
        {"response_format": {"type": "text"}, "tools": None, "tool_choice": "auto", "parallel_tool_calls": True},
    ],
)
def test_17_to_24_values_that_ask_for_nothing(server: Serving, fields: dict[str, Any]) -> None:
    assert server.post({"prompt": "x", "max_tokens": 3} | fields).status_code == 200
    assert server.post({"messages": MESSAGES, "max_tokens": 3} | fields, CHAT_PATH).status_code == 200


def test_19_a_tiny_temperature_is_greedy(server: Serving) -> None:
    texts = {
        server.post({"prompt": "x", "temperature": heat, "ignore_eos": True}).json()["choices"][0]["text"]
        for heat in (0, 1e-45, 1e-6)
    }
    assert len(texts) == 1


def test_22_a_stop_string_across_events() -> None:
    script = dict(enumerate(b"one two three four", start=1))
    with serving(scripted(lambda: ScriptedRunner(CAPACITY, eos=script))) as server:
        body = {"prompt": "x", "max_tokens": 18, "stop": ["two thr"]}
        assert server.post(body).json()["choices"][0]["text"] == "one "
        *chunks, _ = events_of(server.post(body | {"stream": True}).text)
        assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == "one "
        assert chunks[-1]["choices"][0]["finish_reason"] == "stop"


def test_24_completions_have_fewer_log_probabilities_than_chats(server: Serving) -> None:
    for wrong in (6, -1, True):
        assert check_error(server.post({"prompt": "x", "logprobs": wrong}), 400)["param"] == "logprobs"


def test_27_options_of_streams(server: Serving) -> None:
    *chunks, _ = events_of(server.post({"prompt": "x", "stream": True, "stream_options": {}}).text)
    assert all("usage" not in chunk for chunk in chunks)


def test_33_unknown_fields(server: Serving) -> None:
    body = {"prompt": "x", "foo": 1, "continuous_usage_stats": True, "ignore_eos": True}
    assert server.post(body).status_code == 200
    with serving(scripted(), ServerSettings(strict_fields=True)) as strict:
        assert check_error(strict.post(body), 400, "unknown_parameter")["param"] == "continuous_usage_stats"
        assert strict.post({"prompt": "x", "ignore_eos": True}).status_code == 200
        called = {"id": "a", "type": "function", "function": {"name": "f", "arguments": "{}", "foo": 1}}
        nested: list[tuple[dict[str, Any], str]] = [
            ({"messages": [*MESSAGES, {"role": "user", "content": "x", "foo": 1}]}, "messages[1].foo"),
            (
                {"messages": [*MESSAGES, {"role": "assistant", "tool_calls": [called]}]},
                "messages[1].tool_calls[0].function.foo",
            ),
            ({"messages": MESSAGES, "stream": True, "stream_options": {"foo": 1}}, "stream_options.foo"),
        ]
        for body, param in nested:
            assert server.post(body, CHAT_PATH).status_code == 200
            assert check_error(strict.post(body, CHAT_PATH), 400, "unknown_parameter")["param"] == param
        assert strict.post({"messages": MESSAGES, "stop": ["a", "b"]}, CHAT_PATH).status_code == 200


def test_33_reasoning_of_earlier_turns_goes_to_the_template() -> None:
    turn = {"role": "assistant", "content": "b", "reasoning_content": "why"}
    assert ChatMessage.model_validate(turn).for_template() == turn


def test_35_salts_and_keys_share_no_cached_prompt() -> None:
    prompt = "a" * 200

    def cached(server: Serving, key: str, salt: str | None) -> int:
        headers = {"authorization": f"Bearer {key}"}
        answer = server.post({"prompt": prompt, "max_tokens": 1, "cache_salt": salt}, headers=headers)
        return int(answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"])

    keys = {"one": "the-first-key", "two": "the-second-key"}
    with serving(scripted(), ServerSettings(api_keys=keys)) as server:
        assert cached(server, keys["one"], None) == 0
        assert cached(server, keys["one"], None) > 0
        assert cached(server, keys["two"], None) == 0
        assert cached(server, keys["one"], "s") == 0
        assert cached(server, keys["one"], "s") > 0
        assert cached(server, keys["two"], "s") == 0
        assert cached(server, keys["one"], "one") == 0


def test_36_ids_of_requests(server: Serving) -> None:
    body, headers = {"prompt": "x", "max_tokens": 4, "ignore_eos": True}, {"x-request-id": "same"}
    with concurrent.futures.ThreadPoolExecutor(20) as pool:
        asked = [pool.submit(server.post, body, headers=headers) for _ in range(100)]
        answers = [future.result() for future in asked]
    assert {answer.status_code for answer in answers} == {200}
    assert {answer.headers["x-request-id"] for answer in answers} == {"same"}
    assert len({answer.json()["id"] for answer in answers}) == 100
    for odd in ("a b", "x" * 10_240, "a;b", "é"):
        answer = server.client.get("/v1/models", headers={"x-request-id": odd.encode()})
        assert answer.headers["x-request-id"].startswith("req_")


# -- load and time --------------------------------------------------------------------------------------------------


def slow(seconds: float) -> Callable[[], ScriptedRunner]:
    return lambda: ScriptedRunner(CAPACITY, gate=lambda: time.sleep(seconds))


def test_37_a_burst_over_the_queue() -> None:
    with serving(scripted(slow(0.01)), ServerSettings(max_queue=20)) as server:
        with concurrent.futures.ThreadPoolExecutor(200) as pool:
            body = {"prompt": "x", "max_tokens": 30, "ignore_eos": True}
            answers = [future.result() for future in [pool.submit(server.post, body) for _ in range(200)]]
        served = [answer for answer in answers if answer.status_code == 200]
        refused = [answer for answer in answers if answer.status_code != 200]
        assert served and refused
        for answer in served:
            assert answer.json()["usage"]["completion_tokens"] == 30
        for answer in refused:
            check_error(answer, 503, "server_overloaded")
            assert 1 <= int(answer.headers["retry-after"]) <= 30
        server.check()


def test_37_limits_of_a_key_change_while_it_runs() -> None:
    keys, boss = {"me": KEY}, {"authorization": "Bearer the-boss-of-tests"}
    settings = ServerSettings(
        api_keys=keys, admin_keys={"boss": "the-boss-of-tests"}, key_limits={"me": KeyLimits(concurrency=2)}
    )
    with serving(scripted(slow(0.01)), settings) as server, concurrent.futures.ThreadPoolExecutor() as pool:
        long = [pool.submit(server.post, ENDLESS | {"max_tokens": 60}) for _ in range(2)]
        until(lambda: server.service.limits.live == 2)
        refused = server.post({"prompt": "x"})
        check_error(refused, 429, "rate_limit_exceeded")
        assert 1 <= int(refused.headers["retry-after"]) <= 30
        path = "/v1/admin/keys/me/limits"
        changed = server.client.put(path, json={"tokens_per_minute": 600}, headers=boss)
        assert changed.json() == {"concurrency": None, "tokens_per_minute": 600, "min_priority": 0}
        assert server.client.get(path, headers=boss).json() == changed.json()
        check_error(server.client.put("/v1/admin/keys/you/limits", json={}, headers=boss), 404, "key_not_found")
        bad: list[tuple[str, Any]] = [("concurrency", -1), ("concurrency", "8"), ("concurrency", True), ("self", 1)]
        for field, value in [*bad, ("tokens_per_minute", 1.0), ("cls", {})]:
            assert check_error(server.client.put(path, json={field: value}, headers=boss), 400)["param"] == field
        assert server.post({"prompt": "x" * 700, "max_tokens": 1}).status_code == 200  # overdrawn by one request
        check_error(server.post({"prompt": "x"}), 429, "rate_limit_exceeded")
        assert [future.result().status_code for future in long] == [200, 200]


def test_37_nobody_goes_before_others_unless_its_key_may() -> None:
    settings = ServerSettings(
        api_keys={"me": KEY, "urgent": "the-urgent-key"}, key_limits={"urgent": KeyLimits(min_priority=-5)}
    )
    urgent = {"authorization": "Bearer the-urgent-key"}
    with serving(scripted(), settings) as server:
        error = check_error(server.post({"prompt": "x", "priority": -1}), 400, "invalid_value")
        assert error["param"] == "priority" and "-1" in error["message"] and "0" in error["message"]
        assert server.post({"prompt": "x", "priority": 1}).status_code == 200
        assert server.post({"prompt": "x", "priority": -5}, headers=urgent).status_code == 200
        check_error(server.post({"prompt": "x", "priority": -6}, headers=urgent), 400, "invalid_value")


def test_37_what_is_refused_is_not_charged() -> None:
    settings = ServerSettings(default_limits=KeyLimits(tokens_per_minute=600))
    with serving(scripted(), settings) as server:
        for _ in range(5):
            check_error(server.post({"prompt": [1] * 500 + [10**6], "max_tokens": 1}), 400)
        assert server.post({"prompt": "x" * 500, "max_tokens": 1}).status_code == 200
        assert server.post({"prompt": "x" * 500, "max_tokens": 1}).status_code == 200  # overdraws
        check_error(server.post({"prompt": "x"}), 429, "rate_limit_exceeded")


@pytest.mark.parametrize("path", [b"/v1/completions", b"/tokenize"])
def test_37_bodies_that_do_not_come_hold_no_more_than_a_share(path: bytes) -> None:
    limits = {"max_upload_bytes": 4 * 2**20, "max_body_bytes": 2**20, "body_timeout": 5.0}
    with serving(scripted(), ServerSettings(**limits)) as server, contextlib.ExitStack() as stack:
        held = [stack.enter_context(socket.create_connection(("127.0.0.1", server.port))) for _ in range(2)]
        for sock in held:
            sock.sendall(head(b"", b"Content-Length: %d" % 2**20, path=path, length=False))
        until(lambda: server.service.limits._uploads.held == 2 * 2**20)
        check_error(server.post({"prompt": "x"}, path.decode()), 429, "rate_limit_exceeded")
        for sock in held:
            vanish(sock)
        until(lambda: server.service.limits._uploads.held == 0)
        server.check()


def test_38_a_request_that_waits_too_long_is_never_computed() -> None:
    one_row = Capacity(num_pages=512, page_size=16, max_rows=1, max_batched_tokens=64, max_context=1024, vocab_size=257)
    runner = lambda: ScriptedRunner(one_row, gate=lambda: time.sleep(0.01))  # noqa: E731
    with serving(scripted(runner, one_row), ServerSettings(queue_timeout=0.5)) as server:
        with server.client.stream("POST", "/v1/completions", json={"model": "scripted"} | ENDLESS) as first:
            parts = first.iter_bytes()
            assert next(parts)
            prompts = server.portal.call(server.engine.stats).prompt_tokens
            for stream in (False, True):
                late = server.post({"prompt": "late", "stream": stream})
                check_error(late, 503, "queue_timeout")
                assert 1 <= int(late.headers["retry-after"]) <= 30
            assert server.portal.call(server.engine.stats).prompt_tokens == prompts
        until(lambda: server.idle)


def test_39_a_deadline_in_the_middle() -> None:
    with serving(scripted(slow(0.02))) as server:
        answer = server.post(ENDLESS, headers={"x-request-timeout": "0.5"})
        assert answer.status_code == 200
        *chunks, error = events_of(answer.text)
        assert chunks and error["error"]["code"] == "deadline_exceeded"
        until(lambda: server.idle, seconds=0.2)
        whole = server.post(ENDLESS | {"stream": False}, headers={"x-request-timeout": "0.5"})
        check_error(whole, 503, "deadline_exceeded")
        for odd in ("0", "-1", "x", "nan", "inf"):
            check_error(server.post({"prompt": "x"}, headers={"x-request-timeout": odd}), 400)
        server.check()


def connect(server: Serving, body: dict[str, Any], path: bytes = b"/v1/completions") -> socket.socket:
    sock = socket.create_connection(("127.0.0.1", server.port))
    sock.sendall(head(json.dumps({"model": "scripted"} | body).encode(), path=path))
    return sock


def vanish(sock: socket.socket) -> None:
    """Close with a reset, as a client does that died."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    sock.close()


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("leave", [vanish, socket.socket.close])
@pytest.mark.parametrize("moment", ["queued", "prefill", "decode", "late"])
def test_40_a_client_that_goes_away(moment: str, leave: Callable[[socket.socket], None], stream: bool) -> None:
    held = threading.Event()
    held.set()
    small = Capacity(num_pages=256, page_size=16, max_rows=2, max_batched_tokens=16, max_context=1024, vocab_size=257)
    steps = 0

    def gate() -> None:
        nonlocal steps
        steps += 1
        time.sleep(0.005)
        held.wait()

    with serving(scripted(lambda: ScriptedRunner(small, gate=gate), small)) as server:
        body: dict[str, Any] = {"max_tokens": 300, "ignore_eos": True, "stream": stream}
        others = [connect(server, body | {"prompt": f"other {i}"}) for i in range(2 if moment == "queued" else 0)]
        until(lambda: server.portal.call(server.engine.stats).running == len(others))
        sock = connect(server, body | {"prompt": "x" * (600 if moment == "prefill" else 5)})
        until(lambda: server.service.limits.live == len(others) + 1)
        if moment == "prefill":
            until(lambda: server.portal.call(server.engine.stats).running == 1)
        elif moment in ("decode", "late"):
            until(lambda: server.portal.call(server.engine.stats).generated_tokens > (5 if moment == "decode" else 295))
        leave(sock)
        until(lambda: server.service.limits.live <= len(others))
        gone_at = steps
        until(
            lambda: server.portal.call(lambda: len(server.engine._life.loop.scheduler.roster.requests)) <= len(others)
        )
        assert steps - gone_at <= 3  # two in flight, and one may have been counted in between
        for other in others:
            vanish(other)
        until(lambda: server.idle)
        aborted = server.service.telemetry.recorder.aborted
        unheard = 1 if moment == "late" else 0  # it may have been answered before it was gone
        assert aborted["disconnected"] in (len(others) + 1, len(others) + 1 - unheard)
        assert sum(aborted.values()) == aborted["disconnected"]
        server.check()


def test_43_a_reader_that_stalls() -> None:
    engine = FakeEngine(max_rows=4, max_context=100_000)
    with serving(engine, ServerSettings(stall_timeout=0.5, ping_seconds=0.2, served_model_name="scripted")) as server:
        sock = socket.socket()
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        sock.connect(("127.0.0.1", server.port))
        # Several choices, to fill the buffers before the system takes the client's host for dead.
        body = {"model": "scripted", "prompt": "x", "n": 3, "max_tokens": 90_000, "ignore_eos": True, "stream": True}
        sock.sendall(head(json.dumps(body).encode()))
        until(lambda: server.portal.call(server.engine.stats).generated_tokens > 100, seconds=30)
        server.check_others()
        until(lambda: server.idle, seconds=30)
        assert server.portal.call(server.engine.stats).generated_tokens < 3 * 90_000
        aborted = server.service.telemetry.recorder.aborted
        assert {reason for reason, count in aborted.items() if count} == {"slow_consumer"} and aborted.total() == 1
        sock.close()


def test_45_a_prompt_that_the_pool_can_never_hold() -> None:
    tiny = Capacity(num_pages=4, page_size=16, max_rows=4, max_batched_tokens=64, max_context=1024, vocab_size=257)
    with serving(scripted(lambda: ScriptedRunner(tiny), tiny)) as server:
        check_error(server.post({"prompt": "x" * 65}), 400, "context_length_exceeded")
        assert server.post({"prompt": "x" * 60, "max_tokens": 2}).status_code == 200
        server.check()


@pytest.mark.parametrize(
    ("row", "fault", "status", "code"),
    [
        ("26", NoToken.NON_FINITE, 500, "non_finite_logits"),
        ("47", MemoryError(), 503, "out_of_memory"),
        ("48", RuntimeError("device: /usr/lib/x 0x7fffdeadbeef"), 500, "request_failed"),
        ("51", 300, 500, "request_failed"),
    ],
)
@pytest.mark.parametrize("at", [0, 5])
def test_47_to_51_steps_that_fail(row: str, fault: Any, status: int, code: str, at: int) -> None:
    faults = dict.fromkeys(range(at, at + 50) if row == "47" else [at], fault)  # what finds no memory is tried again
    with serving(scripted(lambda: ScriptedRunner(CAPACITY, faults=faults))) as server:
        answer = server.post(ENDLESS)
        if at:
            *chunks, error = events_of(answer.text)
            assert answer.status_code == 200 and chunks and error["error"]["code"] == code
            assert "0x" not in error["error"]["message"]
        else:
            check_error(answer, status, code)
        faults.clear()
        server.check()


def test_47_memory_that_lacked_once_is_not_noticed() -> None:
    answers = []
    for faults in ({}, {0: MemoryError()}, {5: MemoryError()}):
        with serving(scripted(lambda faults=faults: ScriptedRunner(CAPACITY, faults=faults))) as server:
            answers.append(server.post(ENDLESS | {"max_tokens": 40, "stream": False}).json()["choices"])
            server.check()
    assert answers[0] == answers[1] == answers[2]


class Dying(ScriptedRunner):
    """Dies for good at its tenth step."""

    def launch(self, plan: Any) -> Any:
        from headrace.engine import EngineCrashed

        if self.launched == 10:
            raise EngineCrashed("CUDA error at 0x7fffdeadbeef")
        return super().launch(plan)


def test_49_a_device_that_dies() -> None:
    from headrace.engine import EngineCrashed

    with pytest.raises(EngineCrashed), serving(scripted(lambda: Dying(CAPACITY))) as server:
        *chunks, error = events_of(server.post(ENDLESS).text)
        assert chunks and error["error"]["code"] == "engine_dead" and "0x" not in error["error"]["message"]
        late = server.post({"prompt": "x"})
        check_error(late, 503, "engine_dead")
        assert late.headers["x-should-retry"] == "false"
        assert server.client.get("/health/ready").status_code == 503
        assert server.client.get("/health/live").status_code == 200


def test_50_a_device_that_hangs(caplog: pytest.LogCaptureFixture) -> None:
    release = threading.Event()
    runner = lambda: ScriptedRunner(CAPACITY, gate=lambda: release.wait(20))  # noqa: E731
    with serving(scripted(runner), ServerSettings(ready_stall=0.3, stall_abort=1.0)) as server:
        assert server.client.get("/health/ready").json() == {"status": "ready"}
        sock = connect(server, ENDLESS)
        until(lambda: server.client.get("/health/ready").status_code == 503, seconds=2)
        assert server.client.get("/health/live").status_code == 200
        answer = b""
        while b'"code":"engine_stalled"' not in answer:
            answer += sock.recv(65536) or b"the end"
            assert not answer.endswith(b"the end")
        sock.close()
        release.set()
        until(lambda: server.client.get("/health/ready").status_code == 200, seconds=2)
        assert caplog.text.count("the stacks of all threads follow") == 1
        server.check()


# -- the end --------------------------------------------------------------------------------------------------------


def read_streams(
    process: Process, count: int, body: dict[str, Any]
) -> tuple[list[concurrent.futures.Future[str]], Any]:
    pool = concurrent.futures.ThreadPoolExecutor(count)
    started = threading.Semaphore(0)

    def read(number: int) -> str:
        with httpx2.Client(base_url=process.url, trust_env=False, timeout=30) as client:
            asked = {"model": "scripted", "prompt": f"{number}"} | body
            with client.stream("POST", "/v1/completions", json=asked) as answer:
                text = ""
                for part in answer.iter_text():
                    if not text:
                        started.release()
                    text += part
                return text

    futures = [pool.submit(read, number) for number in range(count)]
    for _ in range(count):
        assert started.acquire(timeout=20)
    return futures, pool


def drains(process: Process) -> bool:
    """Whether a server has acted on a signal and goes on; two signals that come before that may count as one."""
    return httpx2.get(f"{process.url}/health/ready", trust_env=False).status_code == 503


BODY = {"stream": True, "ignore_eos": True, "temperature": 0}


def test_61_sigterm_lets_streams_end_and_refuses_new_work() -> None:
    with Process(drain_seconds=20) as process:
        futures, pool = read_streams(process, 50, BODY | {"max_tokens": 100})
        process.signal()
        until(lambda: drains(process))
        refused = httpx2.post(
            f"{process.url}/v1/completions", json={"model": "scripted", "prompt": "x"}, trust_env=False
        )
        check_error(refused, 503, "server_shutting_down")
        assert refused.headers["retry-after"] and refused.headers["connection"] == "close"
        assert httpx2.get(f"{process.url}/health/ready", trust_env=False).status_code == 503
        for future in futures:
            *chunks, done = events_of(future.result(timeout=20))
            assert done == "[DONE]" and chunks[-1]["choices"][0]["finish_reason"] == "length"
        assert process.process.wait(timeout=10) == 0
        pool.shutdown()


def test_61_streams_that_cannot_end_are_told() -> None:
    with Process(drain_seconds=0.5) as process:
        futures, pool = read_streams(process, 20, BODY | {"max_tokens": 8000})
        process.signal()
        for future in futures:
            *chunks, error = events_of(future.result(timeout=20))
            assert chunks and error["error"]["code"] == "server_shutting_down"
        assert process.process.wait(timeout=10) == 0
        pool.shutdown()


def test_61_a_second_signal_ends_at_once() -> None:
    with Process(drain_seconds=60) as process:
        futures, pool = read_streams(process, 5, BODY | {"max_tokens": 8000})
        process.signal(signal.SIGINT)
        until(lambda: drains(process))
        began = time.monotonic()
        process.signal(signal.SIGINT)
        assert process.process.wait(timeout=10) == 0
        assert time.monotonic() - began < 10  # of the 60 that answers have
        for future in futures:
            assert future.exception(timeout=10) is not None or "[DONE]" not in future.result()
        pool.shutdown()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_second_signal_ends_every_kind_of_connection_without_a_traceback(number: signal.Signals) -> None:
    with Process(drain_seconds=60, log_level="info") as process, contextlib.ExitStack() as stack:
        futures, pool = read_streams(process, 3, BODY | {"max_tokens": 8000})
        ask = json.dumps({"model": "scripted", "prompt": "x", "max_tokens": 8000, **BODY}).encode()
        head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        for sent in (
            b"",
            b"POST /v1/comp",
            head + b"Content-Length: 1000\r\n\r\n{",
            head + b"Content-Length: %d\r\n\r\n" % len(ask) + ask,
        ):
            stack.enter_context(socket.create_connection(("127.0.0.1", process.port))).sendall(sent)
        time.sleep(0.3)
        process.signal(number)
        until(lambda: drains(process))
        process.signal(number)
        _, log = process.process.communicate(timeout=30)  # of the 60 that answers have
        assert process.process.returncode == 0
        assert "Shutting down" in log and "ERROR" not in log and "Traceback" not in log, log
        for future in futures:
            assert future.exception(timeout=10) is not None or "[DONE]" not in future.result()
        pool.shutdown()


def test_a_body_that_never_comes_does_not_hold_up_the_end() -> None:
    with Process(drain_seconds=0.5, log_level="info") as process:
        head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        with socket.create_connection(("127.0.0.1", process.port)) as sock:
            sock.sendall(head + b"Content-Length: 1000\r\n\r\n{")
            time.sleep(0.3)
            process.signal()
            _, log = process.process.communicate(timeout=15)
        assert process.process.returncode == 0 and "ERROR" not in log and "Traceback" not in log, log


def test_sighup_drains_unless_it_is_ignored() -> None:
    with Process(drain_seconds=20) as process:
        futures, pool = read_streams(process, 3, BODY | {"max_tokens": 100})
        process.signal(signal.SIGHUP)
        for future in futures:
            assert events_of(future.result(timeout=20))[-1] == "[DONE]"
        assert process.process.wait(timeout=10) == 0
        pool.shutdown()
    with Process(signals={signal.SIGHUP: signal.SIG_IGN}) as process:  # as nohup starts a process
        process.signal(signal.SIGHUP)
        time.sleep(0.3)
        assert httpx2.get(f"{process.url}/health/ready", trust_env=False).status_code == 200


@pytest.mark.parametrize("files", [129, 159])
def test_too_few_open_files_are_refused_by_name(files: int) -> None:
    script = Path(__file__).parent.with_name("scripted_server.py")
    command = [sys.executable, str(script), json.dumps({"files": files})]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert ended.returncode == 1 and not ended.stdout
    assert f"this process may have {files}: set `ulimit -n 160`" in ended.stderr


def test_63_more_connections_than_file_descriptors() -> None:
    with Process(files=160) as process:
        futures, pool = read_streams(process, 5, BODY | {"max_tokens": 200})
        socks = [socket.create_connection(("127.0.0.1", process.port)) for _ in range(300)]
        assert psutil.Process(process.process.pid).num_fds() < 100
        for future in futures:
            assert events_of(future.result(timeout=20))[-1] == "[DONE]"
        for sock in socks:
            sock.close()
        time.sleep(0.2)
        assert httpx2.get(f"{process.url}/health/ready", trust_env=False).status_code == 200
        pool.shutdown()


def test_64_metrics_of_somebody_who_asks_without_pause(guarded: Serving) -> None:
    boss = {"authorization": "Bearer the-boss-of-tests"}
    check_error(httpx2.get(f"{guarded.url}/metrics", trust_env=False), 401)
    check_error(guarded.client.get("/metrics"), 403, "admin_only")
    for injected in ('x"} 1', "a\nheadrace:up 1", "\u2028", "x" * 200):
        guarded.post({"prompt": "x", "model": injected, "user": injected})
        guarded.client.get("/v1/" + injected.replace("\n", "%0A"))
        guarded.client.request("BREW", "/v1/models")
    guarded.post({"prompt": "x", "max_tokens": 2, "ignore_eos": True})
    began, taken = time.monotonic(), 0.0
    for _ in range(1000):
        answer = guarded.client.get("/metrics", headers=boss)
        taken = max(taken, answer.elapsed.total_seconds())
        assert answer.status_code == 200
    assert taken < 3.0 and time.monotonic() - began < 20
    guarded.check_others()
    time.sleep(0.5)
    text = guarded.client.get("/metrics", headers=boss).text
    assert 'tenant="me"' in text and 'method="other"' in text and 'route="other"' in text
    assert not [line for line in text.splitlines() if len(line) > 200 or "headrace:up" in line]
    assert len(text) < 60_000


def test_65_a_long_prefill_is_no_silence() -> None:
    chunked = Capacity(num_pages=512, page_size=16, max_rows=4, max_batched_tokens=16, max_context=1024, vocab_size=257)
    runner = lambda: ScriptedRunner(chunked, gate=lambda: time.sleep(0.1))  # noqa: E731
    with serving(scripted(runner, chunked), ServerSettings(ping_seconds=0.3)) as server:
        began = time.monotonic()
        body = {"model": "scripted", "prompt": "x" * 480, "max_tokens": 2, "stream": True, "ignore_eos": True}
        with server.client.stream("POST", "/v1/completions", json=body) as answer:
            headers_after = time.monotonic() - began
            text = answer.read().decode()
        assert headers_after < 1.5 < 2.5 < time.monotonic() - began
        assert text.count(": ping") >= 3
        assert events_of(text)[-1] == "[DONE]"


def test_62_a_host_that_dies_without_a_word_is_given_up(server: Serving) -> None:
    """The system ends such a connection, if asked to; with a network that lost everything from a moment on it did."""
    with socket.create_connection(("127.0.0.1", server.port)):
        until(lambda: bool(server.server.server_state.connections))
        for connection in server.server.server_state.connections:
            sock = connection.transport.get_extra_info("socket")  # type: ignore[union-attr]
            assert sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
            option = {name: sock.getsockopt(socket.IPPROTO_TCP, getattr(socket, name)) for name in TCP_OPTIONS}
            assert 0 < option["TCP_USER_TIMEOUT"] <= 60_000
            assert option["TCP_KEEPIDLE"] + option["TCP_KEEPCNT"] * option["TCP_KEEPINTVL"] <= 60


TCP_OPTIONS = ("TCP_USER_TIMEOUT", "TCP_KEEPIDLE", "TCP_KEEPCNT", "TCP_KEEPINTVL")

WITHOUT_TORCH = """
import sys
sys.modules["torch"] = None
import anyio
from headrace.engine import DeviceUnavailable, Engine, SamplingParams
from headrace.engine.bench.host.fake_device import FakeEngine
from headrace.server import create_app
async def main():
    async with FakeEngine() as engine:
        create_app(engine)
        assert (await engine.generate("x", SamplingParams(max_tokens=3))).choices[0].text == "QQQ"
    try:
        async with Engine("any"):
            pass
    except DeviceUnavailable as error:
        assert str(error).startswith("device: ") and "torch" in str(error)
        print("told")
anyio.run(main)
"""


def test_67_without_torch_the_fake_device_runs_and_models_say_what_lacks() -> None:
    done = subprocess.run([sys.executable, "-c", WITHOUT_TORCH], capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == "told", done.stderr


# -- the list itself ------------------------------------------------------------------------------------------------

IN_PARAMETERS = {row for row, _ in BAD_CHATS if row.isdecimal()} | {"18", "26", "48", "51"}
"""Rows that are cases of a test that is named after others."""
ELSEWHERE = {
    25: "server/test_sampling_fields.py::test_an_echo_without_tokens",
    31: "engine/test_chat_template.py::test_no_template_passes_its_limits",
    32: "engine/test_tokenizer.py::test_special_tokens_quoted_in_a_message_stay_text",
    34: "server/test_vectors.py::test_34_what_cannot_be_done_is_refused",
    41: "test_cancellation.py::test_each_way_of_leaving_returns_everything",
    42: "engine/test_stream.py::test_a_second_reader_is_refused_and_the_first_goes_on",
    44: "test_cancellation.py::test_cancelling_after_the_end_changes_nothing",
    46: "engine/scheduling/test_fairness.py::test_two_that_need_most_of_the_pool_each_both_finish",
    52: "adapters/test_files.py::test_it_is_refused_with_its_reason",
    53: "adapters/test_files.py::test_it_is_refused_with_its_reason",
    54: "adapters/test_files.py::test_below_a_root_only_plain_names_and_no_links",
    55: "server/test_adapters.py::test_what_may_not_be_loaded_is_not",
    56: "engine/test_adapters.py::test_a_replaced_name_changes_for_new_requests_alone",
    57: "engine/test_adapters.py::test_many_adapters_of_mixed_ranks_share_few_slots",
    58: "engine/test_stream.py::test_joined_text_is_the_full_decode_however_it_is_cut",
    59: "server/test_websocket.py::test_59_nobody_without_a_key_or_from_another_page",
    60: "server/test_websocket.py::test_60_frames_that_break_the_protocol",
    66: "engine/test_bad_models.py::test_damaged_folders_are_refused_and_others_open",
    68: "test_network_guard.py::test_remembers_an_attempt_in_a_thread_that_swallows_the_error",
}


def test_each_row_has_its_test() -> None:
    here = {number for name in globals() for number in re.findall(r"_(\d\d)(?=_)", name)} | IN_PARAMETERS
    assert [row for row in range(1, 69) if f"{row:02}" not in here and row not in ELSEWHERE] == []
    for place in ELSEWHERE.values():
        file, _, name = place.partition("::")
        assert f"def {name}(" in (Path(__file__).parents[1] / file).read_text(), place
