"""`CatchUps` has a drafter read what steps without drafts have left, before it drafts and before it is too late.

Owns the graphs of such passes, and bounds of what is unread of each row; the device alone knows how much it is. A pass
is enqueued in front of a step, and nothing waits for it. Never decides which rows draft. Next to read: unread.py.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from functools import partial
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray

from headrace.engine.model.cuda.decodes import Decodes
from headrace.engine.model.cuda.drafting.drafter import LateDrafter
from headrace.engine.model.cuda.drafting.drafts import CudaDrafts
from headrace.engine.model.cuda.drafting.unread import LAG, MOST_ROWS
from headrace.engine.model.cuda.rows import DeviceRows
from headrace.engine.model.cuda.steps import DeviceTime
from headrace.engine.scheduling.plan import StepPlan

__all__ = ["CatchUps"]

_SIZES: Final = (4, 16, 32, MOST_ROWS)
"""Rows of the graphs: up to 16, a pass takes hardly longer than one of fewer rows."""
_NONE: NDArray[np.int64] = np.empty(0, np.int64)


class CatchUps:
    """When a drafter reads the rows of one runner; does nothing for one that reads every step at once."""

    def __init__(
        self,
        drafts: CudaDrafts | None,
        rows: DeviceRows,
        capture: Callable[[Callable[[], object]], torch.cuda.CUDAGraph],
    ) -> None:
        """Start with all that there is read.

        Args:
            drafts: The drafts of the rows; None where none speculates.
            rows: The row table.
            capture: Captures what a function enqueues.
        """
        drafter = None if drafts is None else drafts.drafter
        self._drafter = drafter if isinstance(drafter, LateDrafter) else None
        self._rows, self._capture = rows, capture
        most = min(MOST_ROWS, rows.padding_row)
        self._sizes = [*(size for size in _SIZES if size < most), most]
        self._batch_B = torch.full((most,), rows.padding_row, dtype=torch.int32, device=rows.lengths_R.device)
        """Rows that the next pass reads."""
        self._batch = np.full(most, rows.padding_row, np.int32)
        """The same on the host."""
        self._graphs: dict[int, torch.cuda.CUDAGraph] = {}
        self._unread = np.zeros(rows.padding_row + 1, np.int64)
        """Most unread positions of each row, but for the latest `_steps` steps, and for those that steps with drafts
        leave."""
        self._ends = np.zeros(rows.padding_row + 1, np.int64)
        """Upper bound of the length of each row whose positions may be unread."""
        self._decodes: Decodes | None = None
        """Latest decodes, whose rows are those of the latest `_steps` steps, all without drafts."""
        self._depth = 0
        """Most drafts of a row of the latest decodes."""
        self._going, self._steps, self._most = _NONE, 0, 0
        """Rows of them that speculate, number of such steps, and the most that was unread of a row before these."""
        self._owed: dict[int, int] = {}
        """Row of each page with unread positions of rows that are not in the batch."""

    def capture(self) -> None:
        """Capture all passes, the largest first."""
        for size in reversed(self._sizes) if self._drafter is not None else ():
            self._graph(size)

    def before_decodes(self, decodes: Decodes, depth: int) -> DeviceTime | None:
        """Enqueue what is to be read before a step of `decodes` with up to `depth` drafts a row.

        Returns:
            What measures the time of that; None if nothing is.
        """
        if (drafter := self._drafter) is None:
            return None
        time, most = None, 0 if depth else LAG - drafter.behind - 1
        is_same = self._decodes is not None and decodes.rows is self._decodes.rows
        if not is_same or self._most + self._steps > most:  # not so in the usual case
            self._settle()
            self._going = decodes.rows[self._rows.speculates[decodes.rows]]
            if self._unread[self._going].max(initial=0) > most:
                time = DeviceTime()
                self._read(self._going[self._unread[self._going] > 0])
                time.end()
            self._most = int(self._unread[self._going].max(initial=0))
        self._decodes, self._depth = decodes, depth
        self._steps += not depth
        return time

    def before_changes(self, plan: StepPlan, decodes: Decodes | None) -> None:
        """Enqueue what is to be read before rows of `plan` begin or go back, and pages are copied or others' too.

        Positions of rows that have ended stay unread until then. `decodes` are those of the plan.
        """
        if self._drafter is None:
            return
        if plan.is_bare and self._decodes is not None and decodes is not None and decodes.rows is self._decodes.rows:
            self._pay(self._owing(plan) if self._owed else ())
            return
        latest = self._going.tolist() if self._drafter.behind else ()
        self._settle()
        left, going = self._left(), set[int]() if decodes is None else set(decodes.rows.tolist())
        self._owed = {page: row for row in left if row not in going for page in self._pages(row)}
        new, back = {row.row for row in plan.new_rows}, {given.row for given in plan.given}
        rows = self._owing(plan) | new.intersection(left) | back.intersection((*left, *latest))
        shared = {page for page, _ in (*plan.copies, *plan.spills)}
        shared.update(entry.page for entry in plan.entries if entry.row in new)
        if shared:
            rows.update(row for row in (*left, *latest) if not shared.isdisjoint(self._pages(row)))
        self._pay(rows)
        self._unread[list(new)] = 0

    def read_all(self) -> None:
        """Enqueue the reading of all that is unread, before pages lose their memory."""
        if self._drafter is not None:
            self._settle()
            self._pay(self._left())

    def close(self) -> None:
        """Drop all graphs; none may be running."""
        for graph in self._graphs.values():
            graph.reset()
        self._graphs.clear()

    # -- inside -------------------------------------------------------------------------------------------------------

    def _settle(self) -> None:
        """Bring the bounds of rows up to date with the latest steps."""
        if self._decodes is not None:
            self._unread[self._going] += self._steps
            self._ends[self._decodes.rows] = self._decodes.starts + 1 + self._depth
        self._going, self._steps, self._most, self._decodes = _NONE, 0, 0, None

    def _left(self) -> list[int]:
        """Return the rows of which steps without drafts have left something."""
        left: list[int] = np.flatnonzero(self._unread).tolist()
        return left

    def _pages(self, row: int) -> list[int]:
        """Return the pages of what may be unread of a row."""
        size, end = self._rows.page_size, int(self._ends[row])
        first = max(0, end - 2 * LAG) // size  # a length may be less than its bound
        pages: list[int] = self._rows.pages[row, first : -(-end // size)].tolist()
        return pages

    def _owing(self, plan: StepPlan) -> set[int]:
        """Return the rows that are not in the batch and have unread positions in pages that the plan gives others."""
        return {self._owed[entry.page] for entry in plan.entries if entry.page in self._owed}

    def _pay(self, rows: Collection[int]) -> None:
        """Enqueue the reading of rows that may have left the batch."""
        if rows:
            self._read(np.array(list(rows), np.int64))
            self._owed = {page: row for page, row in self._owed.items() if row not in rows}

    @torch.inference_mode()
    def _read(self, rows: NDArray[np.int64]) -> None:
        """Enqueue the reading of rows."""
        for start in range(0, len(rows), MOST_ROWS):
            some = rows[start : start + MOST_ROWS]
            size = next(size for size in self._sizes if size >= len(some))
            self._choose(some, size)
            self._graph(size).replay()
        self._unread[rows] = 0

    def _choose(self, rows: NDArray[np.int64], size: int) -> None:
        """Enqueue that the next pass of `size` rows is over `rows`."""
        wanted = np.full(size, self._rows.padding_row, np.int32)
        wanted[: len(rows)] = rows
        (changed,) = np.nonzero(self._batch[:size] != wanted)
        if len(changed):
            self._rows.send(self._batch_B, changed, wanted[changed])
            self._batch[:size] = wanted

    def _graph(self, size: int) -> torch.cuda.CUDAGraph:
        graph = self._graphs.get(size)
        if graph is None:
            assert self._drafter is not None
            run = partial(self._drafter.catch_up, self._batch_B[:size])
            run()  # compiles and allocates now; to read twice does no harm
            graph = self._graphs[size] = self._capture(run)
        return graph
