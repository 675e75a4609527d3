"""`Decodes`: the rows of one decode step in the order of the batch, `Ordering`, which sorts them, and `Planned`.

Owns the order, and how attention divides its work where the host plans that; knows nothing of a row's state on the
device. Next to read: rows.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from headrace.ops.cuda.attention.steps import PlannedAttention

__all__ = ["Decodes", "Ordering", "Planned"]

_PLANNED_AHEAD = 64  # tokens: until a planned split of the work is made anew; bounds how uneven it may get


class _Batch(NamedTuple):
    """Rows in the order of a batch."""

    rows: NDArray[np.int64]
    order: NDArray[np.int64]
    back: NDArray[np.int64]


class Decodes:
    """The rows of a decode step in the order of the batch: attention starts them in order, so the longest come first,
    and the short ones fill its end."""

    __slots__ = ("_order", "_starts", "back", "drafts", "goes_on", "rows")

    def __init__(self, batch: _Batch, starts: list[int], drafts: list[int], *, goes_on: bool) -> None:
        """Let the rows of `batch` compute the tokens at `starts`; that and `drafts` are in the order of the plan."""
        self.rows = batch.rows
        self.back = batch.back
        """Place in the batch of each of the plan's works."""
        self.goes_on = goes_on
        """Whether these are the rows of the previous decode step, each one token further."""
        self.drafts = drafts
        """Most drafts that the step may verify for each of the plan's first works; empty if it verifies none."""
        self._order = batch.order
        self._starts = starts

    @property
    def starts(self) -> NDArray[np.int64]:
        """Position of each row's input token, in the order of `rows`; computed at each use: most steps have none.

        Of rows that speculate, these are upper bounds.
        """
        return np.array(self._starts, np.int64)[self._order]

    @property
    def most_drafts(self) -> NDArray[np.int32]:
        """Most drafts of each row, in the order of `rows`."""
        missing = len(self._starts) - len(self.drafts)
        return np.array(self.drafts + [0] * missing, np.int32)[self._order]

    @property
    def mean_context(self) -> int:
        """Mean number of tokens that a row attends to."""
        return sum(self._starts) // len(self._starts) + 1


class Ordering:
    """Sorter of decodes, which remembers its last result, since most steps have the same rows, each one token longer.

    Such a step computes nothing with numpy: between two steps the processor's caches lose most of their contents, so
    rare work costs many times what a benchmark of it alone suggests.
    """

    def __init__(self) -> None:
        """Start without rows."""
        self._rows: list[int] = []
        self._next: list[int] = []
        self._batch = _Batch(*[np.empty(0, np.int64)] * 3)

    def of(self, rows: list[int], starts: list[int], drafts: list[int] | None = None) -> Decodes:
        """Return the decodes of a plan; while `rows` are those of the last call, `Decodes.rows` is the same array."""
        is_same = rows == self._rows
        goes_on = is_same and starts == self._next
        if not is_same:
            order = (-np.array(starts, np.int64)).argsort(kind="stable")
            self._rows, self._batch = rows, _Batch(np.array(rows, np.int64)[order], order, order.argsort())
        self._next = [start + 1 for start in starts]
        return Decodes(self._batch, starts, drafts or [], goes_on=goes_on)


class Planned:
    """The host's division of the work of one batch, which holds until a row outgrows it."""

    def __init__(self, lines: int, attention: Sequence[PlannedAttention]) -> None:
        """Begin without a division, for batches of `lines` tokens."""
        self._attention = attention
        self._covered: NDArray[np.int64] = np.zeros(lines, np.int64)

    def plan(self, lengths: NDArray[np.int64], *, anew: bool) -> None:
        """Plan for `lengths` if another batch was planned since (`anew`), or if a row has outgrown the present plan."""
        if not anew and (lengths <= self._covered).all():
            return
        self._covered = lengths + _PLANNED_AHEAD
        for attention in self._attention:
            attention.plan(self._covered.tolist())
