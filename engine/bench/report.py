"""Tables and JSON of the benchmarks, with the conditions they were measured under; measures nothing itself."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

__all__ = ["conditions", "percentile", "show"]


def conditions(**more: object) -> dict[str, object]:
    """Versions and machine, to be kept with every figure."""
    return {
        "headrace": version("headrace"),
        "torch": version("torch"),
        "transformers": version("transformers"),
        "python": platform.python_version(),
        "machine": platform.machine(),
        "cpus": len(os.sched_getaffinity(0)),
        **more,
    }


def percentile(values: Sequence[float], share: float) -> float:
    """The value below which `share` (0 to 1) of `values` lie."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def show(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]], data: Any, json_path: str | None) -> None:
    """Print a table with its conditions, and write `data` to `json_path` if one is given."""
    console = Console(highlight=False)
    table = Table(title=title, title_justify="left")
    for index, column in enumerate(columns):
        table.add_column(column, justify="left" if index == 0 else "right")
    for row in rows:
        table.add_row(*row)
    console.print(table)
    console.print(", ".join(f"{name} {value}" for name, value in data["conditions"].items()), soft_wrap=True)
    if json_path is not None:
        Path(json_path).write_text(json.dumps(data, indent=2) + "\n")
