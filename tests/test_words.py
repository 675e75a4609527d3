"""The rules of the project's English that a program can check: no fragments, one class to a name, a true glossary."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterator

from source_files import PACKAGES, ROOT, name_of, names_of, sources, tree_of

# A docstring that begins so lacks its noun or its verb, which stand in another line.
FRAGMENTS = frozenset({"As", "Its", "Of", "That", "Theirs", "Those"})
HOST = ("engine/scheduling", "engine/tools")
DEVICE = ("engine/model", "ops")


def parsed() -> dict[str, ast.Module]:
    return {name_of(path): tree_of(path) for path in sources(*PACKAGES)}


def docstrings(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """The line and the text of each docstring of a module, its classes, functions and fields."""
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    for node in ast.walk(tree):
        for statement in node.body if isinstance(node, documented) else ():
            if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant):
                if isinstance(text := statement.value.value, str):
                    yield statement.lineno, text


def ring_of(path: str) -> str:
    if path.startswith("engine/bench") or path.startswith("server/bench"):
        return "benchmarks"
    rings = {"host": HOST, "device": DEVICE, "adapters": ("adapters",), "server": ("server",)}
    return next((ring for ring, folders in rings.items() if path.startswith(folders)), "shell")


def test_no_docstring_is_a_fragment() -> None:
    found = [
        f"{path}:{line}: {text.splitlines()[0]}"
        for path, tree in parsed().items()
        for line, text in docstrings(tree)
        if re.split(r"\W", text, maxsplit=1)[0] in FRAGMENTS
    ]
    assert not found, "\n".join(found)


def test_a_ring_has_no_two_public_classes_of_one_name() -> None:
    places: defaultdict[tuple[str, str], list[str]] = defaultdict(list)
    for path, tree in parsed().items():
        for node in tree.body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places[ring_of(path), node.name].append(path)
    assert not {key: paths for key, paths in places.items() if len(paths) > 1}


def test_the_glossary_names_what_exists() -> None:
    lines = (ROOT / "docs" / "glossary.md").read_text(encoding="utf-8").splitlines()
    rows = [line.strip("|").split("|") for line in lines if line.startswith("| ") and not line.startswith("| word ")]
    assert len(rows) >= 40 and len({row[0] for row in rows}) == len(rows)
    for word, _, place in rows:
        if named := re.fullmatch(r"`([\w.]+)` in (\S+)", place.strip()):
            assert named[1] in names_of(tree_of(ROOT / named[2])), (word, place)
        else:
            assert (ROOT / place.strip()).exists(), (word, place)
