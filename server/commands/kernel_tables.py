"""`print_kernels`: the list of a model's kernels as tables in a terminal; chooses nothing."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

if TYPE_CHECKING:
    from headrace.engine.model.cuda.listed import KernelList

__all__ = ["print_kernels"]


def print_kernels(listed: KernelList, rows: Sequence[int], title: str) -> None:
    """Print which kernel computes what, then which kernels are not used and why.

    Args:
        listed: The kernels.
        rows: Numbers of rows that have a column each; without any, one column holds ranges of rows.
        title: Title above the tables.
    """
    console = Console()
    console.print(title, soft_wrap=True)  # it may be a long path
    table = Table("operation", "computed at once", pad_edge=False)
    for heading in [f"{count:,} rows" if count > 1 else "1 row" for count in rows] or ["rows: kernel"]:
        table.add_column(heading)
    for what, lines in groupby(listed.lines, key=lambda line: line.what):
        for place, line in enumerate(lines):
            table.add_row("" if place else what, line.fused, *line.kernels)
        table.add_section()
    console.print(table)
    console.print("A step takes the first line of an operation that has a kernel for its rows; - is none.")
    refused = Table("not used", "for", "because", title="Kernels that are not used", title_justify="left",
                    pad_edge=False, show_lines=True)  # fmt: skip
    for refusal in listed.refusals:
        refused.add_row(refusal.kernel, refusal.where, refusal.why)
    if listed.refusals:
        console.print(refused)
