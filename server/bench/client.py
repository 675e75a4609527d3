"""One HTTP request at a time over a plain socket, as cheap as a client can be; reads events without parsing them."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass, field
from typing import Any

import anyio
from anyio.abc import SocketStream

from headrace.engine.bench.host.fake_device import FAKE_LETTER

__all__ = ["Reading", "Endpoint", "get", "stream"]

_EVENT = b"data: {"
_DONE = b"data: [DONE]"
_LETTER = FAKE_LETTER.encode()


@dataclass(frozen=True, slots=True)
class Endpoint:
    """A server that a benchmark loads."""

    port: int
    model: str
    pid: int


@dataclass(slots=True)
class Reading:
    """Figures of one request, filled in as data comes; times are in seconds of `time.perf_counter`."""

    began: float = 0.0
    status: int = 0
    arrivals: list[float] = field(default_factory=list)
    """Times at which data came that held events."""
    events: int = 0
    fake_tokens: int = 0
    """Tokens from a fake device, whose letter stands nowhere else in an event."""
    done: bool = False
    """Whether the stream ended as it should."""
    ended: float = 0.0


async def stream(
    target: Endpoint,
    body: dict[str, Any],
    reading: Reading,
    *,
    stop_after: float | None = None,
    keep_times: bool = True,
) -> None:
    """Send a completion request that streams, and read it to its end.

    Args:
        target: The server to send it to.
        body: Fields of the body besides `model` and `stream`.
        reading: Figures to fill in as data comes.
        stop_after: Close the socket after so many seconds, whatever has come.
        keep_times: Whether to note each arrival, not only the first.
    """
    data = json.dumps({"model": target.model, "stream": True, **body}).encode()
    lines = ("POST /v1/completions HTTP/1.1", "Host: localhost", "Content-Type: application/json")
    head = "\r\n".join((*lines, f"Content-Length: {len(data)}", "", ""))
    reading.began = time.perf_counter()
    with anyio.move_on_after(stop_after):
        async with await anyio.connect_tcp("127.0.0.1", target.port) as sock:
            await sock.send(head.encode() + data)
            await _read(sock, reading, keep_times)
    reading.ended = time.perf_counter()


async def _read(sock: SocketStream, reading: Reading, keep_times: bool) -> None:
    tail = b""
    while True:
        try:
            part = await sock.receive(65536)
        except (anyio.EndOfStream, anyio.BrokenResourceError):
            return
        if not reading.status:
            reading.status = int(part[9:12])
        seen = tail + part
        count = seen.count(_EVENT) - tail.count(_EVENT)
        reading.fake_tokens += part.count(_LETTER)
        if count:
            reading.events += count
            if keep_times or not reading.arrivals:
                reading.arrivals.append(time.perf_counter())
        if reading.status != 200 or _DONE in seen:
            reading.done = reading.status == 200
            return
        tail = part[-len(_DONE) :]


async def get(target: Endpoint, path: str) -> float:
    """Send one GET on a fresh connection, and return the seconds that it took."""
    began = time.perf_counter()
    async with await anyio.connect_tcp("127.0.0.1", target.port) as sock:
        await sock.send(f"GET {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n".encode())
        answer = await sock.receive()
    if b" 200 " not in answer[:16]:
        raise RuntimeError(f"{path} answered {answer[:16]!r}")
    return time.perf_counter() - began
