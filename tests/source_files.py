"""The files of the repository as the tests of its own rules read them; holds no tests."""

from __future__ import annotations

import ast
import re
import subprocess
from functools import cache
from pathlib import Path

__all__ = ["PACKAGES", "ROOT", "name_of", "names_of", "repository_files", "sources", "tree_of"]

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("adapters", "engine", "ops", "server")


@cache
def repository_files() -> tuple[Path, ...]:
    """Tracked files and those about to be; without git, all but hidden and built ones."""
    command = ["git", "-C", str(ROOT), "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    found = subprocess.run(command, capture_output=True, text=True, check=False) if (ROOT / ".git").exists() else None
    if found and found.returncode == 0:
        names = [name for name in found.stdout.split("\0") if name]
    else:
        paths = (path.relative_to(ROOT) for path in ROOT.rglob("*"))
        skipped = re.compile(r"^\.(?!ci|git)|__pycache__|\.egg-info|^build|^dist")
        names = [str(path) for path in paths if not skipped.search(str(path))]
    return tuple(path for path in (ROOT / name for name in sorted(names)) if path.is_file())


def sources(*folders: str) -> list[Path]:
    return [path for path in repository_files() if path.suffix == ".py" and path.relative_to(ROOT).parts[0] in folders]


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def names_of(tree: ast.Module) -> set[str]:
    """The names that a module defines, methods as `Class.method`."""
    names: set[str] = set()
    for node in tree.body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            names.add(node.name)
        if isinstance(node, ast.ClassDef):
            methods = (child for child in node.body if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef))
            names |= {f"{node.name}.{method.name}" for method in methods}
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            names.add(node.target.id)
    return names
