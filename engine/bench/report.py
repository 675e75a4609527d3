"""Tables and JSON of the benchmarks, with the conditions they were measured under; measures nothing itself."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console
from rich.table import Table

from headrace.engine.version import headrace_version

__all__ = ["conditions", "percentile", "save", "show", "spread", "table"]

_FILE_WIDTH = 160


def conditions(**more: object) -> dict[str, object]:
    """Return versions and machine, to be kept with every figure, and `more`."""
    return {
        "headrace": headrace_version(),
        "torch": version("torch"),
        "transformers": version("transformers"),
        "python": platform.python_version(),
        "machine": platform.machine(),
        "cpus": len(os.sched_getaffinity(0)),
        **more,
    }


def percentile(values: Sequence[float], share: float) -> float:
    """Return the value below which `share` (0 to 1) of `values` lie."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def _console() -> Console:
    """Return standard output as a console, which is wide where it is a file."""
    console = Console(highlight=False)
    return console if console.is_terminal else Console(highlight=False, width=_FILE_WIDTH)


def table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print a table alone."""
    made = Table()
    for index, column in enumerate(columns):
        made.add_column(column, justify="left" if index == 0 else "right")
    for row in rows:
        made.add_row(*row)
    console = _console()
    console.print(f"\n{title}", markup=False, soft_wrap=True)
    console.print(made)


def spread(values: Sequence[float], form: str) -> str:
    """Return the median with the lowest and the highest value, each formatted as `form`."""
    return f"{median(values):{form}} ({min(values):{form}} to {max(values):{form}})"


def show(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]], data: Any, json_path: str | None) -> None:
    """Print a table with its conditions, and write `data` to `json_path` if one is given."""
    table(title, columns, rows)
    under = ", ".join(f"{name} {value}" for name, value in data["conditions"].items())
    _console().print(under, soft_wrap=True)
    save(data, json_path)


def save(data: Any, json_path: str | None) -> None:
    """Write `data` to `json_path` if one is given."""
    if json_path is not None:
        Path(json_path).write_text(json.dumps(data, indent=2) + "\n")
