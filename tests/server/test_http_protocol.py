"""What is HTTP and what is not: answers are framed as h11 frames them, and ambiguous requests are refused with 400."""

from __future__ import annotations

import json
import logging
import socket

import h11
import pytest
from hypothesis import given
from hypothesis import strategies as st
from serving import Serving, logged, until

from headrace.server.http.h11_protocol import _BoundedConnection

HEADERS = st.sampled_from(([], [("Content-Length", "{size}")], [("Transfer-Encoding", "chunked")]))


def sent(connection: h11.Connection, ask: bytes, headers: list[tuple[str, str]], parts: list[bytes]) -> bytes:
    connection.receive_data(ask)
    connection.next_event()
    whole = [(name, value.format(size=sum(map(len, parts)))) for name, value in headers]
    events = [h11.Response(status_code=200, headers=whole), *map(h11.Data, parts), h11.EndOfMessage()]
    return b"".join(connection.send(event) or b"" for event in events)


@given(HEADERS, st.lists(st.binary(max_size=40), max_size=5), st.sampled_from(("1.0", "1.1")), st.integers(1, 3))
def test_the_bytes_are_those_of_h11(
    headers: list[tuple[str, str]], parts: list[bytes], version: str, times: int
) -> None:
    ours, theirs = _BoundedConnection(h11.SERVER), h11.Connection(h11.SERVER)
    ask = f"GET / HTTP/{version}\r\nHost: a\r\n\r\n".encode()
    for _ in range(times):
        assert sent(ours, ask, headers, parts) == sent(theirs, ask, headers, parts)
        assert ours.our_state is theirs.our_state
        if ours.our_state is not h11.DONE:
            return
        for connection in (ours, theirs):
            connection.next_event()
            connection.start_next_cycle()


def test_the_answer_to_head_has_no_body() -> None:
    assert sent(_BoundedConnection(h11.SERVER), b"HEAD / HTTP/1.1\r\nHost: a\r\n\r\n", [], [b""]).endswith(b"\r\n\r\n")


BODY = b'{"model": "scripted", "prompt": "a", "max_tokens": 1}'
CHUNK = b"%x\r\n%b\r\n" % (len(BODY), BODY)
HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nConnection: close\r\n"
CHUNKED = HEAD + b"Transfer-Encoding: chunked\r\n\r\n"
GET = b"GET /health/live HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"


@pytest.mark.parametrize(
    ("request_bytes", "reason"),
    [
        (GET.replace(b"\r\n", b"\n") + b"\n", "line feed"),
        (GET.replace(b"localhost\r\n", b"localhost\n") + b"\r\n", "line feed"),
        (GET + b"\n", "line feed"),
        (GET + b"X: a\r\n b\r\n\r\n", "folded"),
        (HEAD + b"Transfer-Encoding:\r\n chunked\r\n\r\n" + CHUNK + b"0\r\n\r\n", "folded"),
        (CHUNKED.replace(b"HTTP/1.1", b"HTTP/1.0") + CHUNK + b"0\r\n\r\n", "HTTP/1.0"),
        (GET.replace(b"HTTP/1.1", b"HTTP/2.0") + b"\r\n", "version"),
        (GET.replace(b"HTTP/1.1", b"HTTP/1.2") + b"\r\n", "version"),
        (GET.replace(b"HTTP/1.1", b"HTTP/0.9") + b"\r\n", "version"),
        (CHUNKED + CHUNK + b"0\r\n\n", "line feed"),
        (CHUNKED + CHUNK + b"0\r\nA: b\n\r\n", "line feed"),
        (CHUNKED + CHUNK + b"0\r\nA: b\r\n c\r\n\r\n", "folded"),
        (CHUNKED + CHUNK.replace(b"\r\n", b";a\rb\r\n", 1) + b"0\r\n\r\n", "size of a chunk"),
        (CHUNKED + CHUNK.replace(b"\r\n", b"\n", 1), "size of a chunk"),
        (b"\x16\x03\x01\r\n\r\n", "valid HTTP"),
        (HEAD + b"Content-Length: 4\r\nContent-Length: 5\r\n\r\nabcde", "valid HTTP"),
    ],
)
def test_what_a_proxy_could_read_otherwise_is_refused(server: Serving, request_bytes: bytes, reason: str) -> None:
    with logged() as records:
        answer = server.raw(request_bytes)
    head, _, body = answer.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 400 ") and b"application/json" in head
    error = json.loads(body)["error"]
    assert error["code"] == "invalid_http" and reason in error["message"]
    assert records and all(record.levelno == logging.INFO for record in records)
    server.check()


@pytest.mark.parametrize(("version", "chunk"), [("1.1", b"zz\r\n"), ("1.0", b"")])
def test_a_malformed_head_request_is_refused_without_a_body(server: Serving, version: str, chunk: bytes) -> None:
    head = f"HEAD /health/live HTTP/{version}\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n"
    with logged() as records:
        answer = server.raw(head.encode() + chunk)
    assert answer.startswith(b"HTTP/1.1 400 ") and answer.endswith(b"\r\n\r\n")
    assert records and all(record.levelno == logging.INFO for record in records)
    server.check()


def test_plain_requests_are_not_refused(server: Serving) -> None:
    for request in (
        CHUNKED + CHUNK + b"0\r\nA: b\r\n\r\n",
        CHUNKED + CHUNK.replace(b"\r\n", b";a=b\r\n", 1) + b"0\r\n\r\n",
    ):
        assert server.raw(request).startswith(b"HTTP/1.1 200 ")
    for version in (b"1.0", b"1.1"):
        assert server.raw(GET.replace(b"1.1", version) + b"\r\n").startswith(b"HTTP/1.1 200 ")


@pytest.mark.parametrize("junk", [b"zz\r\n", b"5\nabcde"])
def test_junk_behind_an_answer_cuts_the_connection_without_an_error(server: Serving, junk: bytes) -> None:
    with logged() as records, socket.create_connection(("127.0.0.1", server.port), timeout=5) as sock:
        sock.sendall(b"GET /health/live HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n")
        answer = b""
        while not answer.endswith(b'{"status":"live"}'):
            answer += sock.recv(4096)
        sock.sendall(junk)
        assert sock.recv(4096) == b""
    assert not [record for record in records if record.levelno > logging.INFO]


def test_junk_behind_a_request_that_runs_ends_it_without_an_error(server: Serving) -> None:
    body = b'{"model": "scripted", "prompt": "a", "max_tokens": 900, "ignore_eos": true, "stream": true}'
    with logged() as records, socket.create_connection(("127.0.0.1", server.port), timeout=5) as sock:
        sock.sendall(HEAD + b"Content-Length: %d\r\n\r\n" % len(body) + body)
        assert sock.recv(4096).startswith(b"HTTP/1.1 200 ")
        sock.sendall(b"junk\r\n\r\n")
        until(lambda: server.idle)
        while sock.recv(65536):
            pass
    assert not [record for record in records if record.levelno > logging.INFO]


def test_other_protocols_that_are_offered_are_no_warning(server: Serving) -> None:
    with logged() as records:
        offered = GET.replace(b"close", b"Upgrade, close") + b"Upgrade: h2c\r\n\r\n"
        assert server.raw(offered).startswith(b"HTTP/1.1 200 ")
    assert not [record for record in records if record.levelno > logging.INFO]
