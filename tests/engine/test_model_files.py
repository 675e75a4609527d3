"""Which file of a model is opened, of several GGUF files or of a hub repository; refusals say what would run."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import tiny_models
from adapter_folders import lora_folder

from headrace.engine import Engine, EngineConfig, ModelRejected, SamplingParams
from headrace.engine.life.model_files import find_model

COMMIT = "0123456789abcdef0123456789abcdef01234567"
NAMES = ("Tiny-Q4_K_M.gguf", "Tiny-Q8_0.gguf", "sub/mmproj-Tiny.gguf")
PARTS = ("BF16/Tiny-BF16-00001-of-00002.gguf", "BF16/Tiny-BF16-00002-of-00002.gguf")


def refused(model: object, **options: Any) -> ModelRejected:
    with pytest.raises(ModelRejected) as caught:
        find_model(EngineConfig(model=model, **options))  # type: ignore[arg-type]
    return caught.value


@pytest.fixture
def ggufs(tmp_path: Path) -> Path:
    (tmp_path / "sub").mkdir()
    for name in NAMES:
        (tmp_path / name).write_bytes(b"GGUF")
    return tmp_path


@pytest.mark.parametrize(
    ("pattern", "name"),
    [("*Q4_K_M.gguf", NAMES[0]), ("*q4_k_m*", NAMES[0]), (NAMES[1], NAMES[1]), ("sub/*", NAMES[2]), ("mmp*", NAMES[2])],
)
def test_a_file_is_chosen_by_a_pattern(ggufs: Path, pattern: str, name: str) -> None:
    found = find_model(EngineConfig(model=ggufs, file=pattern))
    assert found == (ggufs / name, Path(name).stem)


@pytest.mark.parametrize(
    ("file", "told"),
    [
        (None, "holds several GGUF files"),
        ("*Tiny*", "several files for *Tiny*"),
        ("*Q5*", "nothing in"),
        ("x", "nothi"),
    ],
)
def test_what_is_not_one_file_is_refused_with_those_that_there_are(ggufs: Path, file: str | None, told: str) -> None:
    error = refused(ggufs, file=file)
    assert error.field == "file" and told in str(error) and NAMES[0] in str(error) and NAMES[1] in str(error)


def test_the_only_gguf_of_a_folder_needs_no_name(tmp_path: Path) -> None:
    (tmp_path / "only.gguf").write_bytes(b"GGUF")
    assert find_model(EngineConfig(model=tmp_path)).path == tmp_path / "only.gguf"
    assert "is a file" in str(refused(tmp_path / "only.gguf", file="*.gguf"))


@pytest.mark.anyio
async def test_an_engine_opens_the_file_that_was_chosen(smollm2: Path, tmp_path: Path) -> None:
    (tmp_path / "SmolLM2.Q4_1.gguf").symlink_to(smollm2)
    (tmp_path / "SmolLM2.Q8_0.gguf").write_bytes(b"GGUF")
    async with Engine(tmp_path, file="*q4_1.gguf", kv_memory="16MiB") as engine:
        assert engine.info.model == "SmolLM2.Q4_1"
        assert (await engine.generate("Hi", SamplingParams(max_tokens=1))).choices[0].token_ids


def test_refusals_say_what_would_run(tmp_path: Path) -> None:
    adapter = lora_folder(tmp_path / "polite", seed=1)
    assert "engine.adapters.load" in str(refused(adapter)) and str(adapter) in str(refused(adapter))
    (tmp_path / "empty").mkdir()
    error = refused(tmp_path / "empty")
    assert error.field == "config.json" and f"no such file in {tmp_path / 'empty'};" in str(error)
    assert "safetensors" in str(error) and ".gguf" in str(error)
    (tmp_path / "empty" / "model.onnx").write_bytes(b"")
    assert "it holds model.onnx;" in str(refused(tmp_path / "empty"))
    (tmp_path / "empty" / "weights.ckpt").write_bytes(b"")
    pickles = "it holds model.onnx, weights.ckpt, of which pickles can run code and are not read: convert them"
    assert pickles in str(refused(tmp_path / "empty"))
    (tmp_path / "model.safetensors").write_bytes(b"")
    assert "give the folder" in str(refused(tmp_path / "model.safetensors"))


def test_a_repository_of_another_format_is_refused_with_what_it_holds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = SimpleNamespace(siblings=[SimpleNamespace(rfilename=name) for name in ("onnx/model.onnx", "config.json")])
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("huggingface_hub.HfApi.model_info", lambda self, name: files)
    error = refused("someone/model", allow_download=True)
    assert str(error).endswith("holds neither safetensors nor a .gguf file; it holds onnx/model.onnx")


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("config", "told"),
    [
        ({}, "pytorch_model.bin is a pickle, which can run code; safetensors are read"),
        (
            {"architectures": ["Olmo4ForCausalLM"]},
            "supported: OlmoeForCausalLM, Olmo3ForCausalLM, Olmo2ForCausalLM and",
        ),
    ],
)
async def test_a_refused_format_or_family_says_what_would_run(config: Any, told: str, tmp_path: Path) -> None:
    folder = tiny_models.random_folder(tmp_path / "model", **config)
    tiny_models.write_tokenizer(folder)
    (folder / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(ModelRejected, match=re.escape(told)):
        async with Engine(folder, dtype="float32", kv_memory="1MiB"):
            pass


@pytest.mark.parametrize(
    ("model", "mentions_the_hub"),
    [
        ("model.gguf", False),
        ("models/llama.gguf", False),
        ("llama", False),
        ("tests/llama", False),
        ("/nowhere/x", False),
        ("a/b/c", False),
        ("someone/some-model", True),
    ],
)
def test_a_missing_file_is_no_hub_id(model: str, mentions_the_hub: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(Path(__file__).resolve().parents[2])
    message = str(refused(model))
    assert message.startswith(f"model: no such folder or file: {model}")
    assert ("hub" in message) is mentions_the_hub


def test_home_folders_are_expanded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    folder = tiny_models.random_folder(tmp_path / "model")
    config = EngineConfig(model="~/model", kernel_cache="~/kernels", load_format="random")
    assert (config.model, config.kernel_cache) == (str(folder), str(tmp_path / "kernels"))
    assert find_model(config).path == folder


@pytest.mark.anyio
async def test_the_folder_of_an_adapter_is_expanded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    lora_folder(tmp_path / "polite", seed=1)
    model = tiny_models.random_folder(tmp_path / "model")
    async with Engine(model, load_format="random", dtype="float32", kv_memory="1MiB", adapter_slots=1) as engine:
        await engine.adapters.load("one", "~/polite")
        await engine.adapters.load("two", "polite", root="~")
        assert [info.name for info in engine.adapters.list()] == ["one", "two"]


def cached(home: Path, files: dict[str, bytes]) -> None:
    """A repository as the hub's library keeps it on a machine."""
    repository = home / "hub" / "models--someone--Tiny-GGUF"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text(COMMIT)
    for name, data in files.items():
        path = repository / "snapshots" / COMMIT / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)


PROGRAM = """
import json, sys
from headrace.engine import EngineConfig, HeadraceError
from headrace.engine.life.model_files import find_model
try:
    found = find_model(EngineConfig(model="someone/Tiny-GGUF", **json.loads(sys.argv[1])))
    print(json.dumps([found.path.name, found.name, found.path.exists()]))
except HeadraceError as error:
    print(json.dumps(str(error)))
"""


def found(home: Path, endpoint: str = "http://127.0.0.1:9", **options: Any) -> Any:
    """What a process of its own finds, since the hub's library reads its environment when it is imported."""
    environment = {**os.environ, "HF_HOME": str(home), "HF_ENDPOINT": endpoint, "HF_HUB_OFFLINE": "0"}
    command = [sys.executable, "-c", PROGRAM, json.dumps(options)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_a_repository_in_the_hubs_cache_needs_no_download(tmp_path: Path) -> None:
    cached(tmp_path, dict.fromkeys(NAMES, b"GGUF"))
    assert found(tmp_path, file="*Q4_K_M.gguf") == [NAMES[0], "Tiny-Q4_K_M", True]
    assert "holds several GGUF files" in found(tmp_path)
    assert "nothing of someone/Tiny-GGUF on this machine matches *BF16*; allow_download=True" in found(
        tmp_path, file="*BF16*"
    )
    assert found(tmp_path, file="*Q8_0*", allow_download=True) == [NAMES[1], "Tiny-Q8_0", True]


class Hub(BaseHTTPRequestHandler):
    """As much of a hub as fetching one repository takes; counts the files that were fetched."""

    fetched: ClassVar[list[str]] = []

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        if path.startswith("/api/models/someone/Tiny-GGUF"):
            siblings = [{"rfilename": name} for name in (*NAMES, *PARTS)]
            body = json.dumps({"id": "someone/Tiny-GGUF", "sha": COMMIT, "siblings": siblings}).encode()
        else:
            body = b"GGUF"
            if self.command == "GET":
                self.fetched.append(path.rpartition("/")[2])
        self.send_response(200)
        headers = {"Content-Length": str(len(body)), "ETag": f'"{path.rpartition("/")[2]}"', "X-Repo-Commit": COMMIT}
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def hub() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    Hub.fetched.clear()
    yield f"http://127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    thread.join()
    server.server_close()


def test_only_the_file_that_was_chosen_is_fetched(hub: str, tmp_path: Path) -> None:
    assert "allow_download=True" in found(tmp_path, hub, file="*Q4_K_M.gguf")
    assert "several" in found(tmp_path, hub, allow_download=True) and Hub.fetched == []
    assert found(tmp_path, hub, file="*Q4_K_M.gguf", allow_download=True) == [NAMES[0], "Tiny-Q4_K_M", True]
    assert Hub.fetched == [NAMES[0]]
    assert found(tmp_path, file="*Q4_K_M.gguf") == [NAMES[0], "Tiny-Q4_K_M", True]  # and is there from now on


def test_all_parts_of_a_model_are_fetched(hub: str, tmp_path: Path) -> None:
    wanted = [PARTS[0].rpartition("/")[2], "Tiny-BF16", True]
    assert found(tmp_path, hub, file="*BF16*", allow_download=True) == wanted
    assert Hub.fetched == [part.rpartition("/")[2] for part in PARTS]
    next(tmp_path.rglob("*-00002-of-00002.gguf")).unlink()
    assert found(tmp_path, hub, file="*BF16*", allow_download=True) == wanted
    assert next(tmp_path.rglob("*-00002-of-00002.gguf")).exists()
