"""Python blocks of the documents, for tests that run them; holds no tests."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from types import CodeType
from typing import Any

import anyio

__all__ = ["ROOT", "blocks", "blocks_under", "run_block"]

ROOT = Path(__file__).resolve().parents[1]


def blocks(document: str) -> list[tuple[str, str]]:
    """Each Python block of a document with its place in it."""
    text = (ROOT / document).read_text(encoding="utf-8")
    matches = re.finditer(r"^```python\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    return [(f"{document}:{text.count(chr(10), 0, match.start()) + 2}", match[1]) for match in matches]


def blocks_under(document: str, places: dict[str, Path]) -> dict[str, list[tuple[str, str]]]:
    """The blocks of a document by the heading that they stand under, with `"path/to/..."` replaced as `places` say."""
    lines = (ROOT / document).read_text(encoding="utf-8").splitlines()
    found: dict[str, list[tuple[str, str]]] = {}
    for place, source in blocks(document):
        for name, path in places.items():
            source = source.replace(f'"path/to/{name}"', repr(str(path)))
        above = [line for line in lines[: int(place.rpartition(":")[2])] if re.match(r"##+ ", line)]
        found.setdefault(above[-1].lstrip("# "), []).append((place, source))
    return found


def run_block(place: str, source: str) -> dict[str, Any]:
    """Run a block, which may await at its top level, and return its names."""
    code: CodeType = compile(source, place, "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT, dont_inherit=True)
    names: dict[str, Any] = {"__name__": "a_block"}

    async def run() -> None:
        await eval(code, names)

    if code.co_flags & 0x80:  # inspect.CO_COROUTINE: it awaits
        anyio.run(run)
    else:
        exec(code, names)
    return names
