"""Real servers on loopback for the tests of the server: one in a thread, one in a process; holds no tests."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import httpx2
from anyio.from_thread import BlockingPortal, start_blocking_portal
from official import Judged

from headrace.engine import Engine, EngineStats
from headrace.engine.scheduling.plan import Capacity
from headrace.engine.testing import ScriptedEngine, ScriptedRunner
from headrace.server import ServerSettings, create_app
from headrace.server.http.running import make_server
from headrace.server.service import Service

__all__ = [
    "CAPACITY",
    "Process",
    "Serving",
    "check_error",
    "events_of",
    "logged",
    "scripted",
    "serving",
    "speaking",
    "unhurried",
    "until",
]

CAPACITY = Capacity(num_pages=512, page_size=16, max_rows=16, max_batched_tokens=256, max_context=1024, vocab_size=257)
LEAKS = re.compile(r"0x[0-9a-f]{6,}|/[a-z]+/[a-z_]+|Traceback|\.py\b|site-packages")


def scripted(runner: Callable[[], ScriptedRunner] | None = None, capacity: Capacity = CAPACITY) -> Engine:
    """A scripted engine whose steps take a moment, so that requests can be caught in the middle."""
    return ScriptedEngine(capacity, runner or (lambda: ScriptedRunner(capacity, gate=lambda: time.sleep(0.001))))


def unhurried() -> Engine:
    """An engine that needs 18 s for 900 tokens: who has gone by then has been noticed."""
    return scripted(lambda: ScriptedRunner(CAPACITY, gate=lambda: time.sleep(0.02)))


def speaking(text: str, prompt_len: int) -> Engine:
    """An engine that answers with `text` a prompt of so many bytes, or of more where tools stand before it."""

    def answer(prompt: str) -> str:
        assert len(prompt.encode()) >= prompt_len, "another prompt than the test's"
        return text

    gate = partial(time.sleep, 0.001)
    return ScriptedEngine(CAPACITY, lambda: ScriptedRunner(CAPACITY, gate=gate), answer=answer)


class Serving:
    """A server that runs in a thread."""

    def __init__(self, portal: BlockingPortal, engine: Engine, settings: ServerSettings) -> None:
        self.app = app = create_app(engine, settings)
        self.portal = portal
        self.engine = engine
        self.service: Service = app.state.service
        self.socket = socket.socket(proto=socket.IPPROTO_TCP)  # named: asyncio sets TCP_NODELAY on no other
        self.socket.bind(("127.0.0.1", 0))
        self.socket.listen()
        self.port = self.socket.getsockname()[1]
        self.judged = Judged(app)
        self.server = make_server(self.judged, host="127.0.0.1", port=self.port, log_level="critical")
        self.url = f"http://127.0.0.1:{self.port}"
        key = next(iter(settings.api_keys.values()), None)
        self.client = httpx2.Client(
            base_url=self.url, headers={"authorization": f"Bearer {key}"} if key else {}, timeout=30, trust_env=False
        )

    async def run(self) -> None:
        async with self.engine:
            await self.server.serve(sockets=[self.socket])

    def post(self, body: Any, path: str = "/v1/completions", **options: Any) -> httpx2.Response:
        """Send a body; a dict gets the model's name if it has none."""
        if isinstance(body, dict):
            body = json.dumps({"model": "scripted", **body})
        headers = {"content-type": "application/json", **options.pop("headers", {})}
        return self.client.post(path, content=body, headers=headers, **options)

    def raw(self, data: bytes, seconds: float = 5.0) -> bytes:
        """Send bytes over a fresh connection, and read to its end or for so long."""
        with socket.create_connection(("127.0.0.1", self.port), timeout=seconds) as sock:
            with contextlib.suppress(OSError):
                sock.sendall(data)
            found = b""
            with contextlib.suppress(OSError):
                while part := sock.recv(65536):
                    found += part
            return found

    def check(self) -> None:
        """The server still serves, and holds nothing of what was asked before."""
        self.check_others()
        until(lambda: self.idle)

    def check_others(self) -> None:
        """The server serves another request, whatever else it has to do."""
        began = time.monotonic()
        answer = self.post({"prompt": "ping", "max_tokens": 2, "ignore_eos": True})
        assert answer.status_code == 200, answer.text
        assert answer.json()["usage"]["completion_tokens"] == 2
        assert time.monotonic() - began < 5.0

    def stats(self) -> EngineStats:
        """The engine's figures, asked for on its event loop."""
        return self.portal.call(self.engine.stats)

    @property
    def idle(self) -> bool:
        stats = self.stats()
        return not (stats.pages_held or stats.running or stats.waiting or stats.paused or self.service.running)


@contextlib.contextmanager
def serving(engine: Engine, settings: ServerSettings | None = None) -> Iterator[Serving]:
    """A server in a thread; stopped at the end, when official schemas judge what it answered."""
    with start_blocking_portal(backend_options={"use_uvloop": False}) as portal:
        here = portal.call(lambda: _make(portal, engine, settings or ServerSettings()))
        running = portal.start_task_soon(here.run)
        until(lambda: here.server.started or running.done(), 60.0)  # a real model loads meanwhile
        try:
            yield here
        finally:
            here.client.close()
            portal.call(here.service.end_all)
            here.server.should_exit = True
            running.result(timeout=20)
        here.judged.judge()


async def _make(portal: BlockingPortal, engine: Engine, settings: ServerSettings) -> Serving:
    return Serving(portal, engine, settings)


class Process:
    """A server in a process of its own, run by tests/scripted_server.py; with a `log_level`, its stderr is a pipe."""

    def __init__(self, *, signals: Mapping[int, signal.Handlers] | None = None, **settings: Any) -> None:
        """Start it with these settings, and with what is done about `signals` other than by default.

        SIGHUP starts at its default, too, since this process may run under nohup, which lets it be ignored.
        """
        dispositions = {signal.SIGHUP: signal.SIG_DFL, **(signals or {})}
        script = Path(__file__).with_name("scripted_server.py")
        self.process = subprocess.Popen(
            [sys.executable, str(script), json.dumps(settings)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE if "log_level" in settings else None,
            text=True,
            env=os.environ,
            preexec_fn=lambda: [signal.signal(*each) for each in dispositions.items()] and None,
        )
        assert self.process.stdout is not None
        self.port = int(self.process.stdout.readline())
        self.url = f"http://127.0.0.1:{self.port}"

    def signal(self, number: int = signal.SIGTERM) -> None:
        self.process.send_signal(number)

    def __enter__(self) -> Process:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        for stream in (self.process.stdout, self.process.stderr):
            if stream is not None:
                stream.close()


@contextlib.contextmanager
def logged() -> Iterator[list[logging.LogRecord]]:
    """What a server in this process logs at INFO and above, those of uvicorn and asyncio included."""
    found: list[logging.LogRecord] = []
    handler = logging.Handler()
    handler.emit = found.append  # type: ignore[method-assign]
    before = {}
    for logger in map(logging.getLogger, ("uvicorn.error", "asyncio", "headrace.server")):
        before[logger] = logger.level
        logger.addHandler(handler)
        logger.setLevel(logging.INFO)
    try:
        yield found
    finally:
        for logger, level in before.items():
            logger.removeHandler(handler)
            logger.setLevel(level)


def until(condition: Callable[[], bool], seconds: float = 10.0) -> None:
    """Wait for something that happens soon."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.005)


def events_of(text: str) -> list[Any]:
    """The data of each event, parsed; `[DONE]` stays text."""
    blocks = [block for block in text.split("\n\n") if block and not block.startswith(":")]
    assert all(block.startswith("data: ") for block in blocks)
    datas = [block.removeprefix("data: ") for block in blocks]
    return [data if data == "[DONE]" else json.loads(data) for data in datas]


def check_error(answer: httpx2.Response, status: int | tuple[int, ...], code: str | None = None) -> dict[str, Any]:
    """OpenAI's error object, which names nothing of the machine."""
    assert answer.status_code in (status if isinstance(status, tuple) else (status,)), answer.text
    body = answer.json()
    assert body.keys() == {"error"}
    error: dict[str, Any] = body["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    assert isinstance(error["message"], str) and error["message"]
    assert not LEAKS.search(error["message"]), error["message"]
    assert answer.headers["x-request-id"]
    if code is not None:
        assert error["code"] == code, error
    return error
