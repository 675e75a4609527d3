"""`Untaken`: hidden states of the target that a draft head has not read yet, the latest of each row.

A head that is asked for no drafts costs little so: it reads many positions of a row at once. Owns what the target
has computed of these positions; never runs a network. Next to read: heads.py.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

import torch

from headrace.engine.model.network.decoder import HiddenStates

__all__ = ["Untaken"]


@dataclass(slots=True)
class _Run:
    """Unread states of one row, without a gap."""

    start: int
    """First position."""
    places: list[tuple[HiddenStates, int]]
    """What a step has computed, and a position's place in it; in the order of positions."""
    is_open: bool = False
    """Whether the token behind the last position is not known yet."""

    @property
    def end(self) -> int:
        return self.start + len(self.places)


class Untaken:
    """Hidden states by row and position."""

    def __init__(self) -> None:
        """Start without states."""
        self._of: dict[int, _Run] = {}

    def add(
        self, spans: Mapping[int, tuple[int, int]], rows: Sequence[int], positions: Sequence[int], hidden: HiddenStates
    ) -> None:
        """Keep states that a step has computed; those of a row that goes back replace others.

        Args:
            spans: By row, the first position of which the state is kept, and the one behind the last.
            rows: Row of each token of the step.
            positions: Position of each token, in the same order; those of a row rise by one.
            hidden: The states of the tokens. Those of each row are copied where there are others, so that the few that
                stay unread for long do not keep the memory of all.
        """
        for row, places in groupby(range(len(rows)), key=rows.__getitem__):
            start, end = spans.get(row, (0, 0))
            kept = [place for place in places if start <= positions[place] < end]
            if kept:
                self._cut(row, positions[kept[0]])
                run = self._of.get(row)
                if run is None or run.end != positions[kept[0]]:
                    run = self._of[row] = _Run(positions[kept[0]], [])
                states = hidden if len(kept) == len(hidden.final_NE) else _copied(hidden, kept[0], kept[-1] + 1)
                run.places += [(states, place) for place in range(len(kept))]
                run.is_open = False

    def leave_open(self, row: int) -> None:
        """Take note that the token behind the last position of `row` is not known, until the row goes on."""
        self._of[row].is_open = True

    def _cut(self, row: int, end: int) -> None:
        """Drop the positions of a row from `end` on."""
        run = self._of.get(row)
        if run is not None and end < run.end:
            del run.places[max(0, end - run.start) :]
            if not run.places:
                del self._of[row]

    def forget(self, rows: Iterable[int]) -> None:
        """Drop all states of some rows."""
        for row in rows:
            self._of.pop(row, None)

    def forget_known(self, rows: Iterable[int]) -> None:
        """Drop the states of some rows that `span` tells of."""
        for row in rows:
            if (run := self._of.pop(row, None)) is not None and run.is_open:
                hidden, place = run.places[-1]
                self._of[row] = _Run(run.end - 1, [(_copied(hidden, place, place + 1), 0)], is_open=True)

    @property
    def rows(self) -> list[int]:
        """Rows of which there are states."""
        return list(self._of)

    def span(self, row: int) -> tuple[int, int]:
        """Return the positions of `row` whose following token is known: the first, and the one behind the last.

        Both are equal if there are none.
        """
        run = self._of.get(row)
        return (0, 0) if run is None else (run.start, run.end - run.is_open)

    def gather(self, rows: Sequence[int], positions: Sequence[int]) -> HiddenStates:
        """Return the states of some positions, in order; those of a row rise by one."""
        runs = [self._of[row] for row in rows]
        places = [run.places[position - run.start] for run, position in zip(runs, positions, strict=True)]
        parts = [
            _part(group[0][0], group[0][1], group[-1][1] + 1)
            for group in (list(found) for _, found in groupby(places, key=lambda found: id(found[0])))
        ]
        inputs = zip(*(part.inputs for part in parts), strict=True)
        return HiddenStates(torch.cat([part.final_NE for part in parts]), tuple(map(torch.cat, inputs)))


def _part(hidden: HiddenStates, start: int, end: int) -> HiddenStates:
    """Return a view of the states of some tokens side by side."""
    return HiddenStates(hidden.final_NE[start:end], tuple(each_NE[start:end] for each_NE in hidden.inputs))


def _copied(hidden: HiddenStates, start: int, end: int) -> HiddenStates:
    """Return a copy of the states of some tokens side by side, which keeps the memory of no others."""
    part = _part(hidden, start, end)
    return HiddenStates(part.final_NE.clone(), tuple(each_NE.clone() for each_NE in part.inputs))
