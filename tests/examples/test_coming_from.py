"""Runs the programs of the docs/coming_from_*.md pages, and compares their names with those that headrace has."""

from __future__ import annotations

import ast
import re
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from document_blocks import ROOT, blocks_under, run_block
from serving import serving
from tiny_models import chat_folder

import headrace.engine
from headrace.engine import Engine, EngineConfig, InvalidParams, SamplingParams
from headrace.server import ServerSettings

PAGES = {"coming_from_vllm": "vLLM", "coming_from_openai": "openai", "coming_from_llama_cpp": "llama-cpp-python"}
WRITER = ROOT / "docs/reference/write.py"


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return chat_folder(tmp_path_factory.mktemp("model"))


def program(page: str, heading: str, tiny: Path) -> tuple[str, str]:
    found = blocks_under(f"docs/{page}.md", {"model": tiny})
    assert found.keys() == {f"With {PAGES[page]}", "With headrace"}
    (block,) = found[heading]
    return block


@pytest.mark.parametrize("page", PAGES)
def test_programs_with_headrace_run(page: str, tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_block(*program(page, "With headrace", tiny))
    assert len(capsys.readouterr().out) > 10


def test_the_program_with_openai_runs_on_a_server(
    tiny: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = ServerSettings(served_model_name="gpt-5-mini")
    with serving(Engine(tiny, kv_memory="16MiB"), settings=settings) as server:
        monkeypatch.setenv("OPENAI_BASE_URL", f"{server.url}/v1")
        monkeypatch.setenv("OPENAI_API_KEY", "none")
        names = run_block(*program("coming_from_openai", "With openai", tiny))
        names["client"].close()
    assert len(capsys.readouterr().out) > 10


@pytest.mark.parametrize("page", ["coming_from_vllm", "coming_from_llama_cpp"])
def test_every_option_of_the_other_program_is_understood_or_answered(page: str, tiny: Path) -> None:
    """Each keyword is an option of headrace, is understood, or is refused with what stands for it."""
    _, source = program(page, f"With {PAGES[page]}", tiny)
    calls = [
        node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call) and ast.unparse(node.func) != "print"
    ]
    asked = {each.arg for call in calls for each in call.keywords if each.arg} - {"messages", "stream", "model_path"}
    for name in asked:
        model = SamplingParams if name in SAMPLED else EngineConfig
        if name in model.model_fields:
            continue
        try:
            model(**{name: 32, **({"model": "m"} if model is EngineConfig else {})})
        except InvalidParams as refusal:
            assert "there is no such option (" in str(refusal), name
    assert len(asked) > 5


SAMPLED = {"temperature", "top_p", "max_tokens", "stop", "repeat_penalty"}


@pytest.mark.parametrize("page", PAGES)
def test_names_of_headrace_exist(page: str) -> None:
    """`Class.name` in the right column of a table is an attribute that the class has."""
    text = (ROOT / f"docs/{page}.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| .* \| (.*) \|$", text, re.MULTILINE)
    named = [found for row in rows for found in re.findall(r"`([A-Z]\w+)\.(\w+)`", row)]
    missing = [f"{owner}.{name}" for owner, name in named if name not in attributes(getattr(headrace.engine, owner))]
    assert len(named) > 10 and not missing


def attributes(owner: type[Any]) -> set[str]:
    return {*dir(owner), *(name for each in owner.__mro__ for name in vars(each).get("__annotations__", {}))}


def test_written_pages_are_what_the_script_writes() -> None:
    files = runpy.run_path(str(WRITER))["files"]()
    stale = [path.name for path, text in files.items() if path.read_text(encoding="utf-8") != text]
    assert not stale, f"run `python docs/reference/write.py`, which writes {stale}"


def test_every_exported_name_is_in_the_reference() -> None:
    pages = runpy.run_path(str(WRITER))["PAGES"]
    for name, (module, _) in pages.items():
        script = f"import {module} as m; print(*m.__all__)"
        done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
        text = (ROOT / f"docs/reference/{name}.md").read_text(encoding="utf-8")
        sections = set(re.findall(r"^## (\w+)$", text, re.MULTILINE))
        assert sections == set(done.stdout.split())
        assert not re.search(r"^## \w+\n\n```python\n(.*\n)+?```\n\n## ", text, re.MULTILINE), "one says nothing"
