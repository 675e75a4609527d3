"""The WebSocket endpoint on a real server: many chats on one socket, cancel, credit, and every way to close it."""

from __future__ import annotations

import base64
import json
import logging
import socket as socketlib
import struct
import time
from collections.abc import Iterator
from typing import Any

import anyio
import pytest
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from serving import CAPACITY, Process, Serving, logged, scripted, serving, until
from starlette.websockets import WebSocket
from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.sync.client import ClientConnection, connect

from headrace.engine.bench.host.fake_device import FakeEngine
from headrace.engine.testing import ScriptedRunner
from headrace.server import ServerSettings

KEY = "the-key-of-tests"


@pytest.fixture(scope="module")
def shared() -> Iterator[Serving]:
    with serving(scripted(lambda: ScriptedRunner(CAPACITY, gate=lambda: time.sleep(0.002)))) as here:
        yield here


@pytest.fixture
def server(shared: Serving) -> Iterator[Serving]:
    yield shared
    shared.check()


def opened(port: int, **options: Any) -> ClientConnection:
    return connect(f"ws://127.0.0.1:{port}/v1/chat/completions", proxy=None, **options)


def ask(socket: ClientConnection, identity: str, content: str = "Hi", credit: int | None = None, **fields: Any) -> None:
    body = {"messages": [{"role": "user", "content": content}], "max_tokens": 10, "ignore_eos": True, "stream": True}
    request = {"model": "scripted", "temperature": 0} | body | fields
    socket.send(json.dumps({"type": "request", "id": identity, "request": request, "credit": credit}))


def frames(socket: ClientConnection, *, until_ends: int) -> dict[str, list[dict[str, Any]]]:
    """Frames by id, until so many requests have ended."""
    found: dict[str, list[dict[str, Any]]] = {}
    while until_ends:
        frame = json.loads(socket.recv(timeout=10))
        found.setdefault(frame["id"], []).append(frame)
        until_ends -= frame["type"] in ("done", "error")
    return found


def text_of(found: list[dict[str, Any]]) -> str:
    chunks = [frame["data"] for frame in found if frame["type"] == "chunk"]
    return "".join(choice["delta"].get("content") or "" for chunk in chunks for choice in chunk["choices"])


def closed_with(socket: ClientConnection) -> int:
    with pytest.raises(ConnectionClosed):
        while True:
            socket.recv(timeout=10)
    assert socket.close_code is not None
    return socket.close_code


def test_many_chats_on_one_socket(server: Serving) -> None:
    with opened(server.port) as socket:
        for number in range(10):
            ask(socket, f"%d{number}", content=f"Question {number}")
        found = frames(socket, until_ends=10)
    for number in range(10):
        mine = found[f"%d{number}"]
        for frame in mine[:-1]:
            ChatCompletionChunk.model_validate(frame["data"])
        assert mine[-1] == {"type": "done", "id": f"%d{number}"}
        assert mine[-2]["data"]["choices"][0]["finish_reason"] == "length"
        messages = [{"role": "user", "content": f"Question {number}"}]
        body = {"messages": messages, "max_tokens": 10, "ignore_eos": True, "temperature": 0}
        whole = server.post(body, "/v1/chat/completions").json()
        assert text_of(mine) == whole["choices"][0]["message"]["content"]


def test_a_chat_that_does_not_stream(server: Serving) -> None:
    with opened(server.port) as socket:
        ask(socket, "a", stream=False)
        whole, done = frames(socket, until_ends=1)["a"]
    ChatCompletion.model_validate(whole["data"])
    assert whole["type"] == "completion" and done["type"] == "done"


def test_a_refusal_is_a_frame_with_its_id_and_others_go_on(server: Serving) -> None:
    with opened(server.port) as socket:
        ask(socket, "good", max_tokens=60)
        ask(socket, "bad", temperature=3)
        socket.send(json.dumps({"type": "request", "id": "none"}))
        found = frames(socket, until_ends=3)
        assert found["bad"][0]["error"]["param"] == "temperature"
        assert found["none"][0]["error"]["param"] == "request"
        assert found["good"][-1]["type"] == "done"
        ask(socket, "good")  # the id is free again
        assert frames(socket, until_ends=1)["good"][-1]["type"] == "done"


def test_a_request_that_nests_too_deep_is_refused(server: Serving) -> None:
    nested: Any = {}
    for _ in range(400):
        nested = {"properties": nested}
    tool = {"type": "function", "function": {"name": "f", "parameters": nested}}
    with opened(server.port) as socket:
        ask(socket, "a", tools=[tool], metadata=nested)
        error = frames(socket, until_ends=1)["a"][-1]["error"]
    assert error["code"] == "invalid_json" and error["param"] == "request"


@pytest.mark.parametrize("ids", [["a", "a"], [str(number) for number in range(65)]])
def test_an_id_in_use_or_too_many_requests_close_the_socket(server: Serving, ids: list[str]) -> None:
    with opened(server.port) as socket:
        for identity in ids:
            ask(socket, identity, max_tokens=900, credit=0)
        assert closed_with(socket) == 4001
    until(lambda: server.idle)


def test_a_cancel_after_the_last_frame_is_not_answered(server: Serving, monkeypatch: pytest.MonkeyPatch) -> None:
    """The end is on its way, but the socket is busy: the cancel comes between."""
    send = WebSocket.send_text

    async def slow(self: WebSocket, data: str) -> None:
        if '"done"' in data:
            await send(self, '{"type": "ending", "id": "a"}')
            await anyio.sleep(0.3)
        await send(self, data)

    monkeypatch.setattr(WebSocket, "send_text", slow)
    with opened(server.port) as socket:
        ask(socket, "a", max_tokens=2)
        while json.loads(socket.recv(timeout=10))["type"] != "ending":
            pass
        socket.send(json.dumps({"type": "cancel", "id": "a"}))
        assert json.loads(socket.recv(timeout=10)) == {"type": "done", "id": "a"}
        with pytest.raises(TimeoutError):
            socket.recv(timeout=0.5)


# -- clients that do not read ---------------------------------------------------------------------------------------


def unread(port: int) -> socketlib.socket:
    """A client whose kernel takes little, and that reads nothing after the handshake."""
    sock = socketlib.socket()
    sock.setsockopt(socketlib.SOL_SOCKET, socketlib.SO_RCVBUF, 4096)
    sock.settimeout(3.0)
    sock.connect(("127.0.0.1", port))
    lines = ["GET /v1/chat/completions HTTP/1.1", "Host: localhost", "Upgrade: websocket", "Connection: Upgrade"]
    lines += ["Sec-WebSocket-Version: 13", f"Sec-WebSocket-Key: {base64.b64encode(bytes(16)).decode()}", "", ""]
    sock.sendall("\r\n".join(lines).encode())
    assert b" 101 " in sock.recv(400)
    return sock


def masked(data: bytes, opcode: int, *, last: bool = True) -> bytes:
    """A short frame, masked with zeros."""
    size = bytes([0x80 | len(data)]) if len(data) < 126 else bytes([0x80 | 126]) + struct.pack("!H", len(data))
    return bytes([0x80 * last | opcode]) + size + bytes(4) + data


def test_pings_of_a_client_that_reads_no_pongs_are_left_unread() -> None:
    with serving(scripted(), ServerSettings(stall_timeout=1)) as server, unread(server.port) as sock:
        flood, sent = masked(b"p" * 125, 9) * 500, 0
        began = time.monotonic()
        with pytest.raises(OSError):  # the server reads no more, then cuts the connection
            while time.monotonic() - began < 10:
                sent += sock.send(flood)
        assert sent < 16 * 2**20
        until(lambda: not server.server.server_state.connections)
        server.check()


def test_a_stalled_reader_is_cut_off() -> None:
    engine = FakeEngine(max_context=20_000, num_pages=20_000)
    settings = ServerSettings(served_model_name="scripted", stall_timeout=1)
    with serving(engine, settings) as server, unread(server.port) as sock:
        body = {"model": "scripted", "messages": [{"role": "user", "content": "x"}], "stream": True, "n": 8}
        body |= {"max_tokens": 19_000, "ignore_eos": True}
        frame = json.dumps({"type": "request", "id": "a", "request": body}).encode()
        sock.sendall(masked(frame, 1))
        until(lambda: bool(server.service.running))
        until(lambda: not server.server.server_state.connections, seconds=20)
        assert not server.service.running


def close_frame(code: int, reason: bytes) -> bytes:
    return bytes([0x88, 2 + len(reason)]) + struct.pack("!H", code) + reason


def test_a_message_in_too_many_parts_is_closed_with_the_reason(server: Serving) -> None:
    with unread(server.port) as sock:
        sock.sendall(masked(b"{", 1, last=False) + masked(b"", 0, last=False) * 50_000)  # more than is read at once
        assert sock.recv(100) == close_frame(1009, b"a message may have 1024 parts")
        assert sock.recv(100) == b""
    until(lambda: not server.server.server_state.connections)


def test_text_that_is_not_utf8_is_closed_without_a_traceback(server: Serving) -> None:
    for frames_sent in (masked(b"\xff", 1), masked(b"\xe2", 1, last=False) + masked(b"\xff", 0)):
        with logged() as records, unread(server.port) as sock:
            sock.sendall(frames_sent)
            assert sock.recv(100) == close_frame(1007, b"text must be UTF-8")
            assert sock.recv(100) == b""
        assert not [record for record in records if record.levelno > logging.INFO]


def test_a_client_that_does_not_end_a_connection_that_failed_is_cut_off(server: Serving) -> None:
    with unread(server.port) as sock:
        sock.sendall(masked(b"\xff", 1))
        until(lambda: not server.server.server_state.connections)


HANDSHAKE = (
    b"GET /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
    b"Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\n"
)


@pytest.mark.parametrize(
    ("more", "status"),
    [
        (b"Host: evil.example\r\n", 400),
        (b"Origin: https://evil.example\r\n", 403),
        (b"Content-Length: 5\r\n", 400),
        (b"Transfer-Encoding: chunked\r\n", 400),
        (b"Sec-WebSocket-Protocol: \x01\r\n", 400),
        (b"X: " + b"a" * 20_000 + b"\r\n", 431),
        (b"".join(b"X-%d: a\r\n" % number for number in range(300)), 431),
    ],
)
def test_a_handshake_that_is_refused_is_answered_and_is_no_error(server: Serving, more: bytes, status: int) -> None:
    with logged() as records:
        answer = server.raw(HANDSHAKE + more + b"\r\n")
    assert answer.startswith(b"HTTP/1.1 %d " % status)
    assert not [record for record in records if record.levelno > logging.INFO]
    until(lambda: len(server.server.server_state.connections) <= 1)  # the client of `check` keeps its own


def test_cancel_ends_one_request_alone(server: Serving) -> None:
    with opened(server.port) as socket:
        ask(socket, "long", max_tokens=900)
        ask(socket, "short", max_tokens=30)
        json.loads(socket.recv(timeout=10))
        socket.send(json.dumps({"type": "cancel", "id": "long"}))
        socket.send(json.dumps({"type": "cancel", "id": "nobody"}))
        found = frames(socket, until_ends=2)
        assert found["long"][-1]["error"]["code"] == "cancelled"
        assert found["short"][-1]["type"] == "done"
        until(lambda: server.idle)


def test_without_credit_the_engine_stops_computing() -> None:
    window = 32
    engine = FakeEngine(max_rows=8, step_seconds=0.001, max_unread_tokens=window)
    with serving(engine, ServerSettings(served_model_name="scripted")) as server, opened(server.port) as socket:
        ask(socket, "a", max_tokens=1000, credit=1)

        def generated() -> int:
            return server.portal.call(server.engine.stats).generated_tokens

        until(lambda: server.portal.call(server.engine.stats).paused == 1)
        until(lambda: server.portal.call(server.engine.stats).steps_in_flight == 0)
        stopped_at = generated()
        assert stopped_at < 3 * window
        time.sleep(0.1)
        assert generated() == stopped_at
        socket.send(json.dumps({"type": "credit", "id": "a", "tokens": 2 * window}))
        until(lambda: generated() > stopped_at)
        socket.send(json.dumps({"type": "credit", "id": "a", "tokens": 1000}))
        assert len(text_of(frames(socket, until_ends=1)["a"])) == 1000


def test_no_more_tokens_come_than_there_is_credit() -> None:
    """However many tokens have gathered meanwhile: a token is one character here."""
    engine = FakeEngine(max_rows=8, step_seconds=0.0, max_unread_tokens=64)
    with serving(engine, ServerSettings(served_model_name="scripted")) as server, opened(server.port) as socket:
        ask(socket, "a", max_tokens=40, credit=1)
        text, granted = "", 1
        until(lambda: server.portal.call(server.engine.stats).generated_tokens >= 40)
        while True:
            frame = json.loads(socket.recv(timeout=10))
            if frame["type"] == "done":
                break
            found = text_of([frame])
            text += found
            assert len(text) <= granted
            if found and len(text) == granted:
                socket.send(json.dumps({"type": "credit", "id": "a", "tokens": 3}))
                granted += 3
        assert len(text) == 40


@pytest.mark.parametrize(
    ("frame", "code"),
    [
        (b"\x00\x01", 1003),
        ("not json", 4001),
        ("[]", 4001),
        ("{}", 4001),
        ('{"type": "dance", "id": "a"}', 4001),
        ('{"type": "credit", "id": "a", "tokens": -1}', 4001),
        ('{"type": "cancel", "id": ""}', 4001),
        ('{"type": "cancel", "id": "' + "a" * 2**21 + '"}', 1009),
    ],
)
def test_60_frames_that_break_the_protocol(server: Serving, frame: str | bytes, code: int) -> None:
    with opened(server.port) as socket:
        ask(socket, "a", max_tokens=900)
        socket.recv(timeout=10)
        socket.send(frame)
        assert closed_with(socket) == code
    until(lambda: server.idle)


def test_60_a_client_that_closes_in_the_middle(server: Serving) -> None:
    with opened(server.port) as socket:
        for number in range(5):
            ask(socket, str(number), max_tokens=900)
        socket.recv(timeout=10)
        for _ in range(200):
            socket.ping()
    until(lambda: server.idle)


@pytest.mark.parametrize(
    ("headers", "origin", "status"),
    [({}, None, 401), ({"authorization": "Bearer wrong-key"}, None, 401), ("good", "https://evil.example", 403)],
)
def test_59_nobody_without_a_key_or_from_another_page(headers: Any, origin: Any, status: int) -> None:
    good = {"authorization": f"Bearer {KEY}"}
    with serving(scripted(), ServerSettings(api_keys={"me": KEY})) as server:
        with pytest.raises(InvalidStatus) as refused:
            opened(server.port, additional_headers=good if headers == "good" else headers, origin=origin)
        assert refused.value.response.status_code == status
        with opened(server.port, additional_headers=good) as socket:
            ask(socket, "a")
            assert frames(socket, until_ends=1)["a"][-1]["type"] == "done"


def test_61_a_draining_server_ends_its_sockets() -> None:
    with Process(drain_seconds=10) as process, opened(process.port) as idle, opened(process.port) as busy:
        ask(busy, "a", max_tokens=60)
        busy.recv(timeout=10)
        process.signal()
        assert closed_with(idle) == 1012
        found = frames(busy, until_ends=1)
        assert found["a"][-1]["type"] == "done"
        assert closed_with(busy) == 1012
        assert process.process.wait(timeout=10) == 0


@pytest.mark.parametrize("credit", [None, 1])
def test_61_what_cannot_end_is_told(credit: int | None) -> None:
    with Process(drain_seconds=0.5) as process, opened(process.port) as busy:
        ask(busy, "a", max_tokens=8000, credit=credit)
        busy.recv(timeout=10)
        process.signal()
        assert frames(busy, until_ends=1)["a"][-1]["error"]["code"] == "server_shutting_down"
        assert closed_with(busy) == 1012
        assert process.process.wait(timeout=10) == 0
