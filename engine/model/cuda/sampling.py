"""`RowSampler`: the last part of each step of a CUDA engine: from logits to a token in every row, as the row asked.

Owns which rows ask for what, and the memory between the kernels that serve them; never decides which rows run. A batch
in which nobody asks for filters, shaped logits or log-probabilities runs none of their kernels. Next to read:
shaping.py, reports.py and ops/cuda/sampling/sample.py.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from functools import partial
from typing import Final, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from headrace.engine.model.cuda.grammars import GrammarRows
from headrace.engine.model.cuda.reports import USUAL_PLACES, Lines, ReportedRows
from headrace.engine.model.cuda.rows import DeviceRows
from headrace.engine.model.cuda.shaping import ShapedRows
from headrace.engine.model.shared.host_choice import HostChoices
from headrace.engine.scheduling.plan import Capacity, GivenTokens, StepPlan
from headrace.engine.scheduling.shaping import Choice
from headrace.ops.cuda.sampling.sample import SampleScratch, sample
from headrace.ops.cuda.sampling.shape import count_chosen, shape

__all__ = ["PLAIN", "VARIANTS", "RowSampler", "Variant"]


class Variant(NamedTuple):
    """What the rows of a batch ask for, as far as other kernels serve it."""

    filtered: bool
    """Top-k, top-p or min-p."""
    shaped: bool
    """Anything of `Shaping`."""
    places: int
    """Of lines of log-probabilities, for the likeliest tokens; 0 without such lines."""
    masked: bool = False
    """The host acts between logits and choice (`act_between`): it sends the masks of grammars, or takes logits."""


PLAIN: Final = Variant(filtered=False, shaped=False, places=0)
VARIANTS: Final = tuple(itertools.starmap(Variant, itertools.product((False, True), (False, True), (0, USUAL_PLACES))))
"""All whose kernels differ, but for the lines of large beam searches."""


class RowSampler:
    """Samples for the rows of one runner, on one stream."""

    def __init__(self, rows: DeviceRows, capacity: Capacity, device: torch.device) -> None:
        """Allocate nothing yet.

        Args:
            rows: The row table.
            capacity: Most rows of a batch, and the width of the logits.
            device: Where.
        """
        self._rows, self._capacity, self._device = rows, capacity, device
        self._shaped = ShapedRows(rows, capacity, device)
        self.reported = ReportedRows(rows, capacity, device)
        self.grammars = GrammarRows(capacity, device)
        self.hosts = HostChoices(capacity)
        self.choices: dict[int, Callable[[], Choice]] = {}
        """Of the step that is being enqueued: what makes the choices of rows that the host chooses for, once their
        logits are there."""
        self._pinned: dict[int, Tensor] = {}
        """That memory, for each row that ever asked. It is kept: memory freed by another thread while a graph is being
        captured on the stream that wrote it spoils the capture."""
        self._scratch: dict[Variant, SampleScratch] = {}
        self._last: tuple[NDArray[np.int64], Variant] | None = None
        """The last rows asked about, which nobody writes to, and what they ask for, until rows change hands."""

    def begin(self) -> None:
        """Another step is about to be enqueued."""
        self.choices, self.grammars.forced = {}, {}

    def take(self, plan: StepPlan) -> Sequence[GivenTokens]:
        """Enqueue what the new rows of `plan`, which the row table has taken in, ask beyond their sampling.

        Returns:
            The tokens that it gives to rows, but for those that were left out meanwhile.

        Raises:
            torch.OutOfMemoryError: They are the first that ask, and there is no memory for it.
        """
        if plan.new_rows or plan.left_rows:
            self._last = None
        self._shaped.take(plan.new_rows, plan.options)
        self.reported.take(plan.new_rows, plan.options)
        return self.grammars.take(plan)

    def variant(self, rows: NDArray[np.int64]) -> Variant:
        """What these rows ask for together."""
        if self._last is None or self._last[0] is not rows:
            variant = Variant(
                filtered=bool(self._rows.filtered[rows].any()),
                shaped=bool(self._shaped.asks[rows].any()),
                places=self.reported.places(rows),
                masked=bool(self.grammars.asks[rows].any() or self.hosts.asks[rows].any()),
            )
            self._last = rows, variant
        return self._last[1]

    def act_between(self, logits_BV: Tensor, rows: NDArray[np.int64], places: NDArray[np.int64]) -> NDArray[np.int64]:
        """Enqueue what the host does between the logits of `rows`, in their order, and the choices from them.

        The masks of those that keep to a grammar are sent, for which it waits for the steps of their last tokens; the
        logits of those that the host chooses for are fetched.

        Args:
            logits_BV: Just enqueued.
            rows: Theirs, or as many as there are of the first lines.
            places: The positions of the tokens that are chosen.

        Returns:
            Which of `rows` must be left out of the choice.

        Raises:
            torch.AcceleratorError: The device failed.
        """
        late: Sequence[int] = ()
        if self.grammars.asks[rows].any():
            late = self.grammars.send(rows, places, self._shaped.arrays().bits_RW)
        for line in np.flatnonzero(self.hosts.asks[rows]).tolist():
            row = int(rows[line])
            if row not in self._pinned:
                self._pinned[row] = torch.empty(self._capacity.vocab_size, pin_memory=True)
            self._pinned[row].copy_(logits_BV[line], non_blocking=True)
            self.choices[row] = partial(self.hosts.choice, row, self._pinned[row].numpy())
        return np.flatnonzero(np.isin(rows, late))

    def close(self) -> None:
        """Join threads."""
        self.grammars.close()

    def lines(self, rows: NDArray[np.int64], first: int) -> list[Lines]:
        """The lines, if any, that a choice for these rows has just left from line `first` on."""
        places = self.variant(rows).places
        return [self.reported.written(rows, places, first)] if places else []

    def choose(
        self,
        logits_BV: Tensor,
        rows_B: Tensor,
        positions_B: Tensor,
        ids_B: Tensor,
        variant: Variant,
        *,
        first: int = 0,
        pdl: bool = False,
    ) -> None:
        """Choose and keep a token for each row.

        Args:
            logits_BV: As the model gave them.
            rows_B: int32 row numbers, of which the padding row may come more than once.
            positions_B: int32 or int64: where each row's input token is.
            ids_B: int32: where the ids go, `NON_FINITE` and `NOTHING_LEFT` as in plan.py.
            variant: What the rows ask for.
            first: Where their lines begin among those of log-probabilities.
            pdl: Launch programmatically dependent.

        Raises:
            torch.OutOfMemoryError: The variant is new, and there is no memory for what it needs.
        """
        rows, given_BV = self._rows, logits_BV
        if variant.shaped:
            logits_BV = shape(logits_BV, rows_B, positions_B, rows.pool_RC, self._shaped.arrays(), pdl=pdl)
        sample(
            logits_BV, rows_B, rows.temperature_R, rows.top_k_R, rows.top_p_R, rows.min_p_R, rows.seed_R, positions_B,
            rows.pool_RC, rows.lengths_R, ids_B, self._scratch_for(variant), stops_RS=rows.stops_RS,
            stopped_R=rows.stopped_R, filtered=variant.filtered, pdl=pdl,
        )  # fmt: skip
        if variant.shaped:
            count_chosen(rows_B, ids_B, self._shaped.arrays(), pdl=pdl)
        if variant.places:
            self.reported.write(given_BV, rows_B, ids_B, variant.places, first, pdl=pdl)

    def _scratch_for(self, variant: Variant) -> SampleScratch:
        key = variant._replace(places=0, masked=False)
        scratch = self._scratch.get(key)
        if scratch is None:
            scratch = self._scratch[key] = SampleScratch(
                self._capacity.max_rows, self._capacity.vocab_size, self._device,
                dtype=torch.float32, filters=variant.filtered,
            )  # fmt: skip
        return scratch
