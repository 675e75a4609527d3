"""Runs every Python block of README.md and of the documents on the real model.

A block that awaits, or uses an `engine`, at its top level is a fragment and runs inside an open engine; any other block
is a program of its own, whose `test_` functions, if it has some, are called too. A block that imports pytest is a
module of tests, which pytest runs.
"""

from __future__ import annotations

import ast
import inspect
import re
import subprocess
import sys
from pathlib import Path
from types import CodeType, FunctionType

import anyio
import pytest
import torch
from adapter_folders import write_folder
from document_blocks import ROOT, blocks

from headrace.engine import Engine, EngineConfig, SamplingParams

PROGRAMS = [
    "README.md",
    "docs/adapters.md",
    "docs/embedding.md",
    "docs/extending.md",
    "docs/scheduling.md",
    "docs/serving.md",
]
ELSEWHERE = [
    "docs/cookbook.md",
    "docs/extending_formats.md",
    *(f"docs/coming_from_{tool}.md" for tool in ("vllm", "openai", "llama_cpp")),
]
"""Run by test_cookbook.py, tests/additive/test_toy_format.py and test_coming_from.py."""
FRAGMENTS = [f"docs/{name}.md" for name in ("sampling", "hooks", "embedding", "embeddings", "serving", "speculation")]


def code_of(place: str, source: str, model: Path, **others: Path) -> CodeType:
    places = {"model.gguf": model, "encoder": others.get("encoder"), "peft/folder": others.get("adapter")}
    for name, path in places.items():
        source = source.replace(f'"path/to/{name}"', repr(str(path)))
    code: CodeType = compile(source, place, "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT, dont_inherit=True)
    return code


def is_suite(source: str) -> bool:
    return re.search(r"^import pytest", source, re.MULTILINE) is not None


def split(document: str, model: Path, **others: Path) -> tuple[list[CodeType], list[CodeType]]:
    """The programs and the fragments of a document; `others` are an `encoder` and an `adapter`."""
    codes = [code_of(place, source, model, **others) for place, source in blocks(document) if not is_suite(source)]
    fragments = [code for code in codes if code.co_flags & inspect.CO_COROUTINE or "engine" in code.co_names]
    return [code for code in codes if code not in fragments], fragments


def run_program(code: CodeType) -> None:
    namespace: dict[str, object] = {"__name__": "a_block"}
    exec(code, namespace)
    for name, value in list(namespace.items()):
        if name.startswith("test_") and isinstance(value, FunctionType):
            value()


def test_every_document_with_python_is_run() -> None:
    documents = {path.relative_to(ROOT).as_posix() for path in [ROOT / "README.md", *ROOT.glob("docs/*.md")]}
    assert {document for document in documents if blocks(document)} == {*PROGRAMS, *FRAGMENTS, *ELSEWHERE}


@pytest.fixture
def adapter(tmp_path: Path) -> Path:
    """An adapter of SmolLM2 that changes a little of its first layer."""
    name = "base_model.model.model.layers.0.self_attn.q_proj.lora_{}.weight"
    tensors = {name.format("A"): torch.full((4, 576), 0.01), name.format("B"): torch.full((576, 4), 0.01)}
    return write_folder(tmp_path / "adapter", {"peft_type": "LORA", "r": 4, "lora_alpha": 4}, tensors)


@pytest.mark.parametrize("document", PROGRAMS)
def test_programs_run(document: str, smollm2: Path, adapter: Path) -> None:
    programs, _ = split(document, smollm2, adapter=adapter)
    assert programs
    for code in programs:
        run_program(code)


def test_modules_of_tests_pass(tmp_path: Path) -> None:
    suites = [source for document in PROGRAMS for _, source in blocks(document) if is_suite(source)]
    for number, source in enumerate(suites):
        (tmp_path / f"test_block_{number}.py").write_text(source, encoding="utf-8")
    (tmp_path / "pytest.ini").write_text("[pytest]\nfilterwarnings = error\n", encoding="utf-8")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:asyncio", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert suites and done.returncode == 0, done.stdout + done.stderr


def test_fragments_run_and_leave_nothing_behind(
    smollm2: Path, minilm: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    parts = {document: split(document, smollm2, encoder=minilm) for document in FRAGMENTS}
    assert all(fragments for _, fragments in parts.values())
    assert not parts["docs/sampling.md"][0] and not parts["docs/hooks.md"][0]
    fragments = [code for document in FRAGMENTS for code in parts[document][1]]
    closing = [code for code in fragments if {"engine", "aclose"} <= {*code.co_names}]
    assert len(closing) == 1 and len(fragments) > 5

    async def run() -> None:
        async with Engine(smollm2, kv_memory="64MiB") as engine:
            for code in [code for code in fragments if code not in closing] + closing:
                running = eval(code, {"engine": engine, "anyio": anyio, "SamplingParams": SamplingParams})
                if inspect.isawaitable(running):
                    await running
                if code not in closing:
                    await nothing_held(engine)

    anyio.run(run)
    printed = capsys.readouterr().out
    assert re.search(r"\[.*'cancelled'\]", printed)
    assert re.search(r"[1-9]\d* tokens were cached for tenant a\n0 for tenant b\n[1-9]\d* with the salt of a", printed)
    assert "refused: prompt: prompt: is empty" in printed
    assert "temperature: " in printed


async def nothing_held(engine: Engine) -> None:
    with anyio.fail_after(30):
        while engine.stats().pages_held or engine.stats().steps_in_flight:  # noqa: ASYNC110 - it has no event
            await anyio.sleep(0.005)


def table_under(heading: str) -> dict[str, str]:
    """First and second column of the table under a heading of docs/embedding.md."""
    text = (ROOT / "docs/embedding.md").read_text(encoding="utf-8").split(f"\n## {heading}\n")[1].split("\n## ")[0]
    return dict(re.findall(r"^\| `(\w+)` (?:\(.*?\) )?\| (.*?) \|", text, re.MULTILINE))


@pytest.mark.parametrize(("heading", "model"), [("Options", EngineConfig), ("Sampling parameters", SamplingParams)])
def test_tables_list_every_field_with_its_default(
    heading: str, model: type[EngineConfig] | type[SamplingParams]
) -> None:
    fields = {name: field.default for name, field in model.model_fields.items() if not field.is_required()}
    table = {name: ast.literal_eval(default.strip("`")) for name, default in table_under(heading).items()}
    assert table == fields


def test_the_table_of_errors_is_complete() -> None:
    import headrace.engine

    errors = {
        name
        for name, value in vars(headrace.engine).items()
        if inspect.isclass(value) and issubclass(value, Exception) and name not in _BASES
    }
    assert errors == table_under("Errors").keys()


_BASES = {"HeadraceError", "LoadFailed", "Rejected"}
