"""What a commit's hash chooses, so that a commit tests the same on every machine and day, and another tests more."""

from __future__ import annotations

import subprocess
from collections import defaultdict
from collections.abc import Iterable, Sequence
from hashlib import sha256
from pathlib import Path

import pytest

__all__ = ["case_of", "chosen", "head", "left_out"]


def head(folder: Path) -> str:
    """The hash of the commit that is checked out in `folder`; empty in a copy without git."""
    try:
        found = subprocess.run(
            ["git", "-C", str(folder), "rev-parse", "HEAD"], capture_output=True, text=True, timeout=20, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return found.stdout.strip() if found.returncode == 0 else ""


def chosen(names: Sequence[str], count: int, commit: str) -> list[str]:
    """`count` of `names`, whatever their order; another commit, as good as surely, chooses others."""
    return sorted(names, key=lambda name: sha256(f"{commit} {name}".encode()).digest())[:count]


def case_of(item: pytest.Item) -> str:
    """The name of a test's case, whether or not pytest-xdist has put a group behind it for its `loadgroup`."""
    return f"{item.parent.nodeid}::{item.name}" if item.parent else item.name


def left_out(cases: Iterable[tuple[str, int]], commit: str) -> set[str]:
    """The names of cases that this commit does not test.

    `cases` are names such as "file.py::test[case]", each with the N of a test that runs one of N of its cases, rounded
    up. A test that is asked for with one case alone runs it.
    """
    tests: dict[tuple[str, int], list[str]] = defaultdict(list)
    for name, share in cases:
        tests[name.partition("[")[0], share].append(name)
    return {
        name
        for (_, share), names in tests.items()
        for name in set(names).difference(chosen(names, -(-len(names) // share), commit))
    }
