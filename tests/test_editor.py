"""What editors make of a checkout in which nothing is installed: type checkers resolve `headrace` to the tree."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import venv
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
TREE_FILE = "engine/scheduling/order/shares.py"
PROGRAM = """from headrace.engine.scheduling.memory.pages import PagePool

reveal_type(PagePool.release)
PagePool.no_such_method
"""


@pytest.fixture
def bare(tmp_path: Path) -> Path:
    """The interpreter of an environment that holds no library at all."""
    venv.create(tmp_path / "bare", with_pip=False, symlinks=True)
    return tmp_path / "bare" / "bin" / "python"


@pytest.fixture
def program(tmp_path: Path) -> Path:
    file = tmp_path / "program.py"
    file.write_text(PROGRAM)
    return file


def found_by(command: list[str]) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if name not in ("MYPYPATH", "PYTHONPATH")}
    command = [sys.executable, "-m", *command]
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment, check=False)


def test_every_package_has_its_link() -> None:
    links = {path.name: path.resolve() for path in (ROOT / ".src" / "headrace").iterdir()}
    assert links == {package: ROOT / package for package in ("adapters", "engine", "ops", "server")}


def test_mypy_resolves_the_tree(tmp_path: Path, bare: Path, program: Path) -> None:
    options = ["--python-executable", str(bare), "--cache-dir", str(tmp_path / "cache"), "--follow-imports", "silent"]
    done = found_by(["mypy", *options, "--no-error-summary", str(program), TREE_FILE])
    lines = [re.sub(r"^.*?:\d+: ", "", line) for line in done.stdout.splitlines()]
    assert len(lines) == 2, done.stdout
    assert lines[0].startswith('note: Revealed type is "def (self: headrace.engine.scheduling.memory.pages.PagePool')
    assert lines[1].startswith('error: "type[PagePool]" has no attribute "no_such_method"')


def test_pyright_resolves_the_tree(bare: Path, program: Path) -> None:
    options = ["--pythonpath", str(bare), "--outputjson", "-p", str(ROOT / "pyproject.toml")]
    done = found_by(["basedpyright", *options, str(program), str(ROOT / TREE_FILE)])
    messages = [each["message"] for each in json.loads(done.stdout)["generalDiagnostics"]]
    assert len(messages) == 2, messages
    assert messages[0].startswith('Type of "PagePool.release" is "(self: PagePool, pages: Sequence[int]')
    assert messages[1].startswith('Cannot access attribute "no_such_method"')
