"""`Untaken`: hidden states of the target that a draft head has not read yet, the latest of each row.

A head that is asked for no drafts costs little so: it reads many positions of a row at once. Owns views of what the
target has computed; never runs a network. Next to read: heads.py.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from itertools import groupby
from typing import NamedTuple

import torch
from torch import Tensor

from headrace.engine.model.network.decoder import HiddenStates

__all__ = ["Untaken"]


class _Run(NamedTuple):
    """Unread states of one row, without a gap."""

    start: int
    """First position."""
    places: list[tuple[HiddenStates, int]]
    """What a step has computed, and a position's place in it; in the order of positions."""


class Untaken:
    """Hidden states by row and position."""

    def __init__(self) -> None:
        """Start without states."""
        self._of: dict[int, _Run] = {}

    def add(self, wanted: Collection[int], rows: Sequence[int], positions: Sequence[int], hidden: HiddenStates) -> None:
        """Keep the states that a step has computed of the rows `wanted`; those of a row that goes back replace others.

        Args:
            wanted: Rows of which states are kept.
            rows: Row of each token of the step.
            positions: Position of each token, in the same order; those of a row rise by one.
            hidden: The states of the tokens.
        """
        for place, (row, position) in enumerate(zip(rows, positions, strict=True)):
            if row in wanted:
                self.cut(row, position)
                run = self._of.get(row)
                if run is None or run.start + len(run.places) != position:
                    run = self._of[row] = _Run(position, [])
                run.places.append((hidden, place))

    def cut(self, row: int, end: int) -> None:
        """Drop the positions of a row from `end` on, such as those of refused drafts."""
        run = self._of.get(row)
        if run is not None and end < run.start + len(run.places):
            del run.places[max(0, end - run.start) :]
            if not run.places:
                del self._of[row]

    def forget(self, rows: Iterable[int]) -> None:
        """Drop all states of some rows."""
        for row in rows:
            self._of.pop(row, None)

    @property
    def rows(self) -> list[int]:
        """Rows of which there are states."""
        return list(self._of)

    def span(self, row: int) -> tuple[int, int]:
        """Return the first position of `row` of which there is a state, and the one behind the last; equal if none."""
        run = self._of.get(row)
        return (0, 0) if run is None else (run.start, run.start + len(run.places))

    def gather(self, rows: Sequence[int], positions: Sequence[int]) -> HiddenStates:
        """Return the states of some positions, in order."""
        runs = [self._of[row] for row in rows]
        places = [run.places[position - run.start] for run, position in zip(runs, positions, strict=True)]
        finals: list[Tensor] = []
        inputs: list[list[Tensor]] = []
        for _, group in groupby(places, key=lambda found: id(found[0])):
            found = list(group)
            hidden, index_N = found[0][0], torch.tensor([place for _, place in found], dtype=torch.int64)
            finals.append(hidden.final_NE[index_N])
            inputs.append([each_NE[index_N] for each_NE in hidden.inputs])
        return HiddenStates(torch.cat(finals), tuple(torch.cat(parts) for parts in zip(*inputs, strict=True)))
