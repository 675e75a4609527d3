"""Imports among the modules of the packages: no circle, those for types and inside functions included."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest
from source_files import PACKAGES, ROOT


def modules(root: Path) -> dict[str, Path]:
    """Return the file of each module below the packages of `root`, by dotted name."""
    paths = [path for package in PACKAGES for path in (root / package).rglob("*.py")]
    return {".".join(path.relative_to(root).with_suffix("").parts).removesuffix(".__init__"): path for path in paths}


def imported(tree: ast.Module, known: Mapping[str, Path]) -> Iterator[str]:
    """Yield the modules that any import statement of `tree` names, wherever it stands."""
    for node in ast.walk(tree):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        for name in (name.removeprefix("headrace.") for name in names):
            found = name if name in known else name.rpartition(".")[0]
            if found in known:
                yield found


def circle(root: Path) -> list[str]:
    """Return the modules of one import circle below `root`, the first of them again at the end; [] without any."""
    known = modules(root)
    graph = {name: set(imported(ast.parse(path.read_text(encoding="utf-8")), known)) for name, path in known.items()}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return list(error.args[1])
    return []


def test_no_module_imports_itself_by_way_of_others() -> None:
    assert circle(ROOT) == []


@pytest.mark.parametrize(
    "back",
    [
        "from headrace.engine.one import ONE\n",
        "from headrace.engine import one\n",
        "import headrace.engine.one as one\n",
        "if TYPE_CHECKING:\n    from headrace.engine.one import ONE\n",
        "def later() -> None:\n    from headrace.engine.one import ONE\n",
    ],
)
def test_a_circle_is_found(tmp_path: Path, back: str) -> None:
    for package in PACKAGES:
        (tmp_path / package).mkdir()
    (tmp_path / "engine" / "one.py").write_text("from headrace.engine.two import TWO\n")
    (tmp_path / "engine" / "two.py").write_text("TWO = 2\n")
    assert circle(tmp_path) == []
    (tmp_path / "engine" / "two.py").write_text(back)
    assert {"engine.one", "engine.two"} == set(circle(tmp_path))
