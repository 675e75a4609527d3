"""The pages of the tour name what exists: every file, and every class, function, method and attribute in back-ticks."""

from __future__ import annotations

import ast
import builtins
import keyword
import re
from functools import cache

import pytest
from source_files import PACKAGES, ROOT, name_of, repository_files, sources, tree_of

PAGES = ("tour.md", "tour_device.md", "tour_host.md")
MOST_LINES = 110  # two pages, for the first hour
MOST_CHARACTERS = 120

# Names of Python and of libraries, and letters of formulas.
FOREIGN = frozenset(("anyio", "async", "gdc_wait", "silu", "x", "A", "T"))


@cache
def page(name: str) -> str:
    return (ROOT / "docs" / name).read_text(encoding="utf-8")


@cache
def files() -> frozenset[str]:
    return frozenset(map(name_of, repository_files()))


@cache
def folders() -> frozenset[str]:
    return frozenset(f"{name.rsplit('/', depth)[0]}/" for name in files() for depth in range(1, name.count("/") + 1))


@cache
def defined() -> tuple[frozenset[str], frozenset[str]]:
    """Return the names that the packages define, and the members of classes, inherited ones too, as `Class.member`."""
    names: set[str] = set()
    members: dict[str, set[str]] = {}
    bases: dict[str, set[str]] = {}
    for path in sources(*PACKAGES):
        for node in ast.walk(tree_of(path)):
            names |= names_in(node)
            if isinstance(node, ast.ClassDef):
                members.setdefault(node.name, set()).update(*map(names_in, ast.walk(node)))
                bases.setdefault(node.name, set()).update(base.id for base in node.bases if isinstance(base, ast.Name))
    for name in files():
        if name.endswith((".cu", ".cuh")):
            names.update(re.findall(r"\b(\w+)(?= \{|\()", (ROOT / name).read_text(encoding="utf-8")))
    for _ in range(4):  # classes inherit from each other no deeper than that
        for name, above in bases.items():
            members[name].update(*(members.get(each, set()) for each in above))
    return frozenset(names), frozenset(f"{name}.{member}" for name, found in members.items() for member in found)


def names_in(node: ast.AST) -> set[str]:
    """Return the names that a node defines: a function, class, parameter, keyword, variable, attribute or field."""
    if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
        return {node.name}
    if isinstance(node, ast.arg):
        return {node.arg}
    if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
        return {node.id}
    if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
        return {node.attr}
    return set()


def unresolved(quoted: str) -> list[str]:
    """Return what is in one pair of back-ticks and does not exist."""
    text = quoted.strip()
    if text.startswith(("make ", "headrace ", "import ")):
        return []
    if re.fullmatch(r"[\w./{},*-]+\.(py|cuh?|md)", text):
        return [] if is_file(text) else [text]
    if re.fullmatch(r"[\w./-]+/", text) or text.startswith("tests/"):
        return [] if f"{text.rstrip('/')}/" in folders() or text in files() else [text]
    names, members = defined()
    known = names | FOREIGN | set(dir(builtins)) | set(keyword.kwlist)
    missing = []
    for found in re.findall(r"[A-Za-z_][\w.]*", text):
        *owner, last = found.rstrip(".").split(".")
        exists = last in known if not owner else f"{owner[-1]}.{last}" in members
        if not exists and not (owner and owner[-1] not in names_of_classes() and {last, *owner} <= known):
            missing.append(found)
    return missing


@cache
def names_of_classes() -> frozenset[str]:
    return frozenset(member.split(".")[0] for member in defined()[1])


def is_file(text: str) -> bool:
    """Return whether a path, or several with alternatives in braces, are the end of some file's path."""
    if braces := re.search(r"\{([\w,]+)\}", text):
        return all(is_file(text.replace(braces[0], each)) for each in braces[1].split(","))
    return any(name == text or name.endswith(f"/{text}") for name in files())


@pytest.mark.parametrize("name", PAGES)
def test_every_name_in_back_ticks_exists(name: str) -> None:
    text = re.sub(r"```.*?```", "", page(name), flags=re.DOTALL)
    quoted = re.findall(r"`([^`]+)`", text)
    assert len(quoted) > 40
    assert not {each: missing for each in quoted if (missing := unresolved(each))}


@pytest.mark.parametrize("name", PAGES)
def test_every_file_that_is_named_exists(name: str) -> None:
    named = re.findall(r"(?<![\w/{])[\w/.]*\w+\.(?:py|cuh?)\b", page(name))
    assert len(named) > 10
    assert not [each for each in named if not is_file(each)]


@pytest.mark.parametrize(
    "wrong", ["engine/gone.py", "Engine.gone", "gone_function", "engine/gone/", "known - absent_name", "tests/gone"]
)
def test_a_name_that_does_not_exist_is_found(wrong: str) -> None:
    assert unresolved(wrong)


def test_the_first_hour_is_two_pages() -> None:
    lines = page("tour.md").splitlines()
    assert len(lines) <= MOST_LINES
    assert not [line for line in lines if len(line) > MOST_CHARACTERS and not line.startswith("|")]
