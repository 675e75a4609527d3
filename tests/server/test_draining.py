"""An application's own server stops gracefully: what runs may end, what is new is refused, and the rest is told."""

from __future__ import annotations

import contextlib
import importlib.util
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anyio
import httpx2
import pytest
from serving import check_error, events_of, scripted, serving, unhurried, until

from headrace.server import drain

ASK: dict[str, Any] = {"model": "scripted", "prompt": "x", "stream": True, "ignore_eos": True}
SCRIPT = Path(__file__).parents[1] / "draining_server.py"
SERVERS = [
    "uvicorn",
    pytest.param(
        "hypercorn",
        marks=pytest.mark.skipif(importlib.util.find_spec("hypercorn") is None, reason="hypercorn is not installed"),
    ),
]


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as sock:
        port: int = sock.getsockname()[1]
        return port


@contextlib.contextmanager
def running(server: str, seconds: float) -> Iterator[tuple[subprocess.Popen[bytes], str]]:
    port = free_port()
    url = f"http://127.0.0.1:{port}/llm"
    process = subprocess.Popen([sys.executable, str(SCRIPT), server, str(port), str(seconds)])

    def serves() -> bool:
        assert process.poll() is None
        with contextlib.suppress(httpx2.TransportError):
            return httpx2.get(f"{url}/health/ready", trust_env=False).status_code == 200
        return False

    try:
        until(serves, 60.0)
        yield process, url
    finally:
        process.kill()
        process.wait()


@pytest.mark.parametrize("server", SERVERS)
@pytest.mark.parametrize(("seconds", "tokens", "ends"), [(30.0, 150, "[DONE]"), (2.0, 8000, "server_shutting_down")])
def test_a_server_of_the_applications_own_drains(server: str, seconds: float, tokens: int, ends: str) -> None:
    with running(server, seconds) as (process, url), httpx2.Client(timeout=60, trust_env=False) as client:
        with client.stream("POST", f"{url}/v1/completions", json=ASK | {"max_tokens": tokens}) as answer:
            parts = answer.iter_text()
            text = next(parts)
            process.send_signal(signal.SIGTERM)
            until(lambda: httpx2.get(f"{url}/health/ready", trust_env=False).status_code == 503)
            check_error(httpx2.post(f"{url}/v1/completions", json=ASK, trust_env=False), 503, "server_shutting_down")
            last = events_of(text + "".join(parts))[-1]
        assert ends == (last if last == "[DONE]" else last["error"]["code"])
        assert process.wait(timeout=20) == 0


def test_drain_returns_when_nothing_runs_any_more() -> None:
    with serving(unhurried()) as here:
        with here.client.stream("POST", "/v1/completions", json=ASK | {"max_tokens": 20}) as answer:
            parts = answer.iter_text()
            text = next(parts)
            done = here.portal.start_task_soon(drain, here.app, 30.0)
            until(lambda: here.service.draining)
            check_error(here.post({"prompt": "x"}), 503, "server_shutting_down")
            assert not done.done()
            assert events_of(text + "".join(parts))[-1] == "[DONE]"
        done.result(timeout=20)
        assert here.idle


def test_drain_of_an_application_at_rest_ends_at_once() -> None:
    with serving(scripted()) as here:

        async def at_once() -> None:
            with anyio.fail_after(5):
                await drain(here.app, 600.0)

        here.portal.call(at_once)
        check_error(here.post({"prompt": "x"}), 503, "server_shutting_down")
