"""`Untaken`: hidden states of the target that a draft head has not taken up yet, the latest of each row.

A head that is asked for no drafts costs next to nothing so: it computes nothing until it is asked. Owns views of what
the target has computed; never runs a network. Next to read: heads.py.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import groupby
from typing import Final

import torch
from torch import Tensor

from headrace.engine.model.network.decoder import HiddenStates

__all__ = ["KEPT", "Untaken"]

KEPT: Final = 64
"""Number of positions of a row that are kept; earlier ones are dropped, so that memory has a bound."""


class Untaken:
    """Hidden states by row and position."""

    def __init__(self) -> None:
        """Start without states."""
        self._of: dict[int, dict[int, tuple[HiddenStates, int]]] = {}
        """Row -> position -> what a step has computed, and the position's place in it; in the order of positions."""

    def add(self, rows: Sequence[int], positions: Sequence[int], hidden: HiddenStates) -> None:
        """Keep the states of a step, of which `rows` and `positions` are in the order of its tokens."""
        for place, (row, position) in enumerate(zip(rows, positions, strict=True)):
            of_row = self._of.setdefault(row, {})
            of_row.pop(position, None)
            of_row[position] = hidden, place

    def cut(self, row: int, end: int) -> None:
        """Drop the positions of a row from `end` on, which were refused drafts, and those that are too many."""
        of_row = self._of.get(row, {})
        while of_row and next(reversed(of_row)) >= end:
            of_row.popitem()
        while len(of_row) > KEPT:
            del of_row[next(iter(of_row))]

    def forget(self, rows: Iterable[int]) -> None:
        """Drop all states of some rows."""
        for row in rows:
            self._of.pop(row, None)

    @property
    def rows(self) -> list[int]:
        """Rows of which there are states."""
        return [row for row, of_row in self._of.items() if of_row]

    def span(self, row: int) -> tuple[int, int]:
        """Return the first position of the latest ones of `row` without a gap, and the one behind; equal if none."""
        of_row = self._of.get(row)
        if not of_row:
            return 0, 0
        end = next(reversed(of_row)) + 1
        start = end - 1
        while start - 1 in of_row:
            start -= 1
        return start, end

    def gather(self, rows: Sequence[int], positions: Sequence[int]) -> HiddenStates:
        """Return the states of some positions, in order."""
        places = [self._of[row][position] for row, position in zip(rows, positions, strict=True)]
        finals: list[Tensor] = []
        inputs: list[list[Tensor]] = []
        for _, group in groupby(places, key=lambda found: id(found[0])):
            found = list(group)
            hidden, index_N = found[0][0], torch.tensor([place for _, place in found], dtype=torch.int64)
            finals.append(hidden.final_NE[index_N])
            inputs.append([each_NE[index_N] for each_NE in hidden.inputs])
        return HiddenStates(torch.cat(finals), tuple(torch.cat(parts) for parts in zip(*inputs, strict=True)))
