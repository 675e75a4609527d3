"""Runs every recipe of docs/cookbook.md on a tiny model, the retrieval on a real encoder, the servers under clients."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx2
import pytest
from document_blocks import ROOT, blocks, blocks_under, run_block
from starlette.testclient import TestClient
from tiny_models import chat_folder

PATIENCE = 60.0
PLAIN = {  # heading -> what its programs print
    "A script": r"Name a river. -> .*Name a lake. -> ",
    "A notebook": r"",
    "Threads": r".{20}",
    "Pydantic objects": r"(billing|shipping|technical) [1-5] ",
    "Classification": r"I love it. -> (positive|negative|neutral)\n.*\nIt is a lamp. -> (positive|negative|neutral)\n",
    "Retrieval": r"^Books are lent for four weeks\.\n.*\n-> ",
    "Limits": r"^busy, come again\n(length|stop)\n(length|stop)\n$",
    "OpenAI's client in process": r"",
}
SERVED = {
    "FastAPI with server-sent events",
    "FastAPI with a WebSocket",
    "OpenAI's API in your application",
    "Graceful shutdown",
}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return chat_folder(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def recipes(tiny: Path, minilm: Path) -> dict[str, list[tuple[str, str]]]:
    return blocks_under("docs/cookbook.md", {"model.gguf": tiny, "encoder": minilm})


def app_of(recipes: dict[str, list[tuple[str, str]]], heading: str) -> dict[str, Any]:
    (recipe,) = recipes[heading]
    return run_block(*recipe)


def test_every_recipe_is_run_and_listed(recipes: dict[str, list[tuple[str, str]]]) -> None:
    assert recipes.keys() == {*PLAIN, *SERVED, "Tests"}
    text = (ROOT / "docs/cookbook.md").read_text(encoding="utf-8")
    assert set(re.findall(r"^\| [^|]* \| \[(.*?)\]\(#", text, re.MULTILINE)) == recipes.keys()


@pytest.mark.parametrize("heading", PLAIN)
def test_programs_run(
    heading: str, recipes: dict[str, list[tuple[str, str]]], capsys: pytest.CaptureFixture[str]
) -> None:
    for recipe in recipes[heading]:
        run_block(*recipe)
        assert re.search(PLAIN[heading], capsys.readouterr().out, re.DOTALL)


def test_server_sent_events(recipes: dict[str, list[tuple[str, str]]]) -> None:
    app = app_of(recipes, "FastAPI with server-sent events")["app"]
    with TestClient(app) as client:
        answer = client.post("/ask", json={"text": "What is rain?", "max_tokens": 8})
        assert answer.headers["content-type"].startswith("text/event-stream")
        assert re.search(r'data: {"text": ".+"}\r\n', answer.text)
        assert re.search(r'event: done\r\ndata: {"reason": "(length|stop)"}', answer.text)
        refused = client.post("/ask", json={"text": "é" * 2000})
        assert refused.status_code == 422 and "2048" in refused.json()["detail"]


def test_a_websocket(recipes: dict[str, list[tuple[str, str]]]) -> None:
    names = app_of(recipes, "FastAPI with a WebSocket")
    with TestClient(names["app"]) as client:
        with client.websocket_connect("/chat") as socket:
            for turn in ("What is rain?", "And snow?"):
                socket.send_text(turn)
                texts = []
                while "text" in (frame := socket.receive_json()):
                    texts.append(frame["text"])
                assert frame["done"] in ("length", "stop") and texts
        with client.websocket_connect("/chat") as socket:
            socket.send_text("What is ice?")
            assert socket.receive_json()["text"]
        deadline = time.monotonic() + PATIENCE
        while client.portal.call(names["engine"].stats).pages_held:
            assert time.monotonic() < deadline, "the request outlived its socket"
            time.sleep(0.01)


def test_a_mounted_server(recipes: dict[str, list[tuple[str, str]]]) -> None:
    app = app_of(recipes, "OpenAI's API in your application")["app"]
    ask = {"model": "small", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 4}
    with TestClient(app, base_url="http://localhost:8000") as client:
        url = "/llm/v1/chat/completions"
        assert client.post(url, json=ask).status_code == 401
        answer = client.post(url, json=ask, headers={"authorization": "Bearer secret-of-batch"})
        assert answer.status_code == 200 and answer.json()["usage"]["completion_tokens"] in range(1, 5)
        many = client.post(url, json=ask | {"n": 5}, headers={"authorization": "Bearer secret-of-batch"})
        assert many.status_code == 400 and "4" in many.json()["error"]["message"]
        assert client.get("/load").json() == {"running": 0, "waiting": 0}


@contextmanager
def served(command: list[str], url: str) -> Iterator[tuple[subprocess.Popen[bytes], httpx2.Client]]:
    """A server in a process of its own that answers at `url`."""
    server = subprocess.Popen([sys.executable, *command], stderr=subprocess.DEVNULL, env=os.environ)
    try:
        with httpx2.Client(base_url=url, timeout=PATIENCE) as client:
            deadline = time.monotonic() + PATIENCE
            while True:
                try:
                    client.get("/")
                    break
                except httpx2.TransportError:
                    assert time.monotonic() < deadline and server.poll() is None
                    time.sleep(0.05)
            yield server, client
    finally:
        server.kill()
        server.wait()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def after_sigterm(server: subprocess.Popen[bytes], client: httpx2.Client, path: str, ask: Any) -> list[str]:
    """The lines of an answer that the server was told to stop amid, with `data` or an event."""
    with client.stream("POST", path, json=ask) as answer:
        lines = (line for line in answer.iter_lines() if line.startswith(("data: ", "event: ")))
        first = next(lines)
        server.send_signal(signal.SIGTERM)
        found = [first, *lines]
    assert server.wait(PATIENCE) in (0, -signal.SIGTERM)
    return found


def test_a_graceful_shutdown(recipes: dict[str, list[tuple[str, str]]], tmp_path: Path) -> None:
    """SIGTERM amid an answer: all of it comes, and the process ends by itself."""
    port = free_port()
    ((_, source),) = recipes["Graceful shutdown"]
    (tmp_path / "app.py").write_text(source.replace("port=8000", f"port={port}"), encoding="utf-8")
    with served([str(tmp_path / "app.py")], f"http://localhost:{port}/llm") as (server, client):
        model = client.get("/v1/models").json()["data"][0]["id"]
        ask = {"model": model, "prompt": "Rain is", "max_tokens": 400, "ignore_eos": True, "stream": True}
        events = after_sigterm(server, client, "/v1/completions", ask | {"stream_options": {"include_usage": True}})
    assert events[-1] == "data: [DONE]"
    assert json.loads(events[-2].removeprefix("data: "))["usage"]["completion_tokens"] == 400


def test_server_sent_events_end_before_the_server_does(
    recipes: dict[str, list[tuple[str, str]]], tmp_path: Path
) -> None:
    port = free_port()
    ((_, source),) = recipes["FastAPI with server-sent events"]
    source = source.replace("max_tokens=question.max_tokens", "max_tokens=1500, ignore_eos=True")
    (tmp_path / "app.py").write_text(source, encoding="utf-8")
    command = ["-m", "uvicorn", "app:app", "--port", str(port), "--timeout-graceful-shutdown", "25"]
    with served([*command, "--app-dir", str(tmp_path)], f"http://localhost:{port}") as (server, client):
        events = after_sigterm(server, client, "/ask", {"text": "What is rain?"})
    assert events[-2:] == ["event: done", 'data: {"reason": "length"}']


def test_the_tests_pass(recipes: dict[str, list[tuple[str, str]]], tmp_path: Path) -> None:
    ((_, app),) = recipes["FastAPI with server-sent events"]
    (tmp_path / "app.py").write_text(app, encoding="utf-8")
    for number, (_, source) in enumerate(recipes["Tests"]):
        (tmp_path / f"test_recipe_{number}.py").write_text(source, encoding="utf-8")
    (tmp_path / "pytest.ini").write_text("[pytest]\npythonpath = .\nfilterwarnings = error\n", encoding="utf-8")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:asyncio", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"[5-9] passed", done.stdout)


def test_links_lead_somewhere() -> None:
    """Files and headings that the users' pages link to are there."""
    pages = [ROOT / "README.md", *ROOT.glob("docs/*.md")]
    lost = []
    for page in pages:
        text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
        for target in re.findall(r"\]\(([^)\s]+)\)", text):
            if re.match(r"https?:", target):
                continue
            name, _, anchor = target.partition("#")
            file = (page.parent / name).resolve() if name else page
            if not file.exists() or (anchor and anchor not in anchors(file)):
                lost.append(f"{page.name}: {target}")
    assert not lost and blocks("docs/cookbook.md")


def anchors(file: Path) -> set[str]:
    headings = re.findall(r"^#+ (.*)$", file.read_text(encoding="utf-8"), re.MULTILINE)
    found = [re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings]
    return {*found, *(f"{anchor}-{count - 1}" for anchor, count in Counter(found).items())}
