"""What editors and type checkers make of the constructors: wrong calls found, options completed and explained."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from headrace.engine import EngineConfig, SamplingParams

ROOT = Path(__file__).resolve().parents[2]
CALLS = Path(__file__).with_name("typed_calls.py")
MYPY = """
[mypy]
strict = true
follow_imports = silent
[mypy-torch.*,numpy.*,transformers.*,rich.*,jinja2.*,tokenizers.*]
follow_imports = skip
"""
ENGINE_OPTIONS = EngineConfig.model_fields.keys() - {"model"}


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the settings of both type checkers, which find `headrace` in the checkout."""
    folder = tmp_path_factory.mktemp("tree")
    (folder / "mypy.ini").write_text(MYPY)
    (folder / "pyrightconfig.json").write_text(
        json.dumps({"typeCheckingMode": "standard", "extraPaths": [str(ROOT / ".src")], "include": []})
    )
    return folder


def by_mypy(tree: Path) -> Iterator[tuple[int, str]]:
    command = [
        sys.executable,
        "-m",
        "mypy",
        "--config-file",
        str(tree / "mypy.ini"),
        "--cache-dir",
        str(tree / "cache"),
    ]
    done = subprocess.run(
        [*command, "--no-error-summary", str(CALLS)],
        capture_output=True,
        text=True,
        env={"MYPYPATH": str(ROOT / ".src")},
    )
    for line in done.stdout.splitlines():
        _, number, kind, message = line.split(":", 3)
        if "error" in kind:
            yield int(number), message
    assert not done.stderr


def by_pyright(tree: Path) -> Iterator[tuple[int, str]]:
    command = [sys.executable, "-m", "basedpyright", "--outputjson", "-p", str(tree), "--pythonpath", sys.executable]
    done = subprocess.run([*command, str(CALLS)], capture_output=True, text=True)
    for found in json.loads(done.stdout)["generalDiagnostics"]:
        yield found["range"]["start"]["line"] + 1, found["message"]


@pytest.mark.parametrize("check", [by_mypy, by_pyright])
def test_wrong_calls_are_found_and_right_ones_are_not(check: Any, tree: Path) -> None:
    wrong = {
        number: marked[1]
        for number, line in enumerate(CALLS.read_text().splitlines(), 1)
        if (marked := re.search(r"# wrong: (\w+)$", line))
    }
    found: dict[int, str] = {}
    for number, message in check(tree):
        found[number] = found.get(number, "") + message
    assert found.keys() == wrong.keys(), found
    assert not {number: found[number] for number, word in wrong.items() if word not in found[number]}
    assert wrong


class LanguageServer:
    """A session with the language server that editors run for Python."""

    def __init__(self, folder: Path, text: str) -> None:
        start = "from basedpyright.langserver import main; main()"
        self._process = subprocess.Popen(
            [sys.executable, "-c", start, "--stdio"], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        self._watchdog = threading.Timer(240.0, self._process.kill)  # else a server that hangs is waited for
        self._watchdog.start()
        self._asked = 0
        self._uri = (folder / "program.py").as_uri()
        workspace = {"uri": folder.as_uri(), "name": "tests"}
        self.ask("initialize", {"processId": None, "workspaceFolders": [workspace], "capabilities": {}})
        self._send({"method": "initialized", "params": {}})
        document = {"uri": self._uri, "languageId": "python", "version": 1, "text": text}
        self._send({"method": "textDocument/didOpen", "params": {"textDocument": document}})

    def at(self, method: str, line: int, column: int) -> Any:
        position = {"line": line, "character": column}
        return self.ask(f"textDocument/{method}", {"textDocument": {"uri": self._uri}, "position": position})

    def ask(self, method: str, params: Any) -> Any:
        self._asked += 1
        self._send({"id": self._asked, "method": method, "params": params})
        while True:
            message = self._read()
            if "method" not in message and message["id"] == self._asked:
                return message["result"]
            if "method" in message and "id" in message:  # what the server wants to know, such as settings
                self._send({"id": message["id"], "result": None})

    def close(self) -> None:
        self._watchdog.cancel()
        self._process.kill()
        self._process.communicate()

    def _send(self, message: dict[str, Any]) -> None:
        data = json.dumps({"jsonrpc": "2.0", **message}).encode()
        assert self._process.stdin is not None
        self._process.stdin.write(b"Content-Length: %d\r\n\r\n%s" % (len(data), data))
        self._process.stdin.flush()

    def _read(self) -> Any:
        assert self._process.stdout is not None
        length = 0
        while line := self._process.stdout.readline().strip():
            name, _, value = line.partition(b":")
            length = int(value) if name.lower() == b"content-length" else length
        return json.loads(self._process.stdout.read(length))


PROGRAM = """from headrace.engine import LLM, Engine, EngineConfig, SamplingParams
Engine("m", kv_memory=1)
LLM("m", kv_memory=1)
EngineConfig(model="m", kv_memory=1)
SamplingParams(max_tokens=1)
SamplingParams().replace(max_tokens=1)
"""


def test_an_editor_completes_every_option_and_explains_it(tree: Path) -> None:
    """The cursor is on the last option for the explanation, and just before it for the completion."""
    options = [ENGINE_OPTIONS] * 2 + [EngineConfig.model_fields.keys()] + [SamplingParams.model_fields.keys()] * 2
    server = LanguageServer(tree, PROGRAM)
    try:
        for line, (source, expected) in enumerate(zip(PROGRAM.splitlines()[1:], options, strict=True), 1):
            option = re.findall(r"(\w+)=", source)[-1]
            column = source.index(option)
            told = server.at("hover", line, column + 1)["contents"]["value"]
            assert {"kv_memory": "Bytes of keys", "max_tokens": "at most"}[option] in told
            offered = server.at("completion", line, column)["items"]
            missing = expected - {each["label"].removesuffix("=") for each in offered} - {"model", option}
            assert not missing, f"{source}: {missing} not offered"
    finally:
        server.close()
