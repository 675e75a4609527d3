"""`Decodes`: the rows of one decode step as they stand in the batch, and `Ordering`, which puts them there.

Owns the order alone; never knows what the device holds of a row. Next to read: rows.py.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

__all__ = ["Decodes", "Ordering"]


class _Batch(NamedTuple):
    """An order of rows."""

    rows: NDArray[np.int64]
    order: NDArray[np.int64]
    back: NDArray[np.int64]


class Decodes:
    """The rows of a decode step as they stand in the batch: attention starts them in order, so the longest come first,
    and the short ones fill its end."""

    __slots__ = ("_order", "_starts", "back", "goes_on", "rows")

    def __init__(self, batch: _Batch, starts: list[int], *, goes_on: bool) -> None:
        """Let the rows of `batch` compute the tokens at `starts`, which are in the order of the plan."""
        self.rows = batch.rows
        self.back = batch.back
        """Where each of the works stands."""
        self.goes_on = goes_on
        """Whether these are the rows of the decodes before, each one token further."""
        self._order, self._starts = batch.order, starts

    @property
    def starts(self) -> NDArray[np.int64]:
        """In the order of `rows`; made anew each time, since most steps have no use for it."""
        return np.array(self._starts, np.int64)[self._order]

    @property
    def mean_context(self) -> int:
        """Tokens that a row attends to."""
        return sum(self._starts) // len(self._starts) + 1


class Ordering:
    """Puts decodes in order; remembers the last ones, since most steps have the same rows, which all grow.

    Where they do, nothing is computed with numpy: between two steps a processor forgets most of what it has cached, and
    what it does seldom costs many times as much as it seems to.
    """

    def __init__(self) -> None:
        """Start with none."""
        self._rows: list[int] = []
        self._next: list[int] = []
        self._batch = _Batch(*[np.empty(0, np.int64)] * 3)

    def of(self, rows: list[int], starts: list[int]) -> Decodes:
        """The decodes of a plan; for the rows of the last call `Decodes.rows` is the same array."""
        is_same = rows == self._rows
        goes_on = is_same and starts == self._next
        if not is_same:
            order = (-np.array(starts, np.int64)).argsort(kind="stable")
            self._rows, self._batch = rows, _Batch(np.array(rows, np.int64)[order], order, order.argsort())
        self._next = [start + 1 for start in starts]
        return Decodes(self._batch, starts, goes_on=goes_on)
