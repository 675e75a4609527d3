"""`RowSampler`: the last part of each step of a CUDA engine: from logits to a token in every row, as the row asked.

Owns the options of rows, and the memory between the kernels that serve them; never decides which rows run. A batch in
which no row asks for filters, shaped logits or log-probabilities runs none of their kernels. Next to read: shaping.py,
reports.py and ops/cuda/sampling/sample.py.
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

from headrace.engine.model.cuda.grammars import DraftsOf, GrammarRows
from headrace.engine.model.cuda.reports import USUAL_PLACES, Lines, ReportedRows
from headrace.engine.model.cuda.rows import DeviceRows
from headrace.engine.model.cuda.shaping import ShapedRows
from headrace.engine.model.shared.host_choice import HostChoices
from headrace.engine.scheduling.plan import Capacity, GivenTokens, StepPlan
from headrace.engine.scheduling.result import Choice
from headrace.ops.cuda.sampling.sample import SampleScratch, sample
from headrace.ops.cuda.sampling.shape import count_chosen, shape

__all__ = ["PLAIN", "VARIANTS", "RowSampler", "Variant"]


class Variant(NamedTuple):
    """The sampling options of a batch that decide which kernels run."""

    filtered: bool
    """Whether a row asks for top-k, top-p or min-p."""
    shaped: bool
    """Whether a row asks for any option of `Shaping`."""
    places: int
    """Places for the likeliest tokens in lines of log-probabilities; 0 without such lines."""
    masked: bool = False
    """Whether the host acts between logits and choice (`act_between`): it sends grammars' masks, or fetches logits."""


PLAIN: Final = Variant(filtered=False, shaped=False, places=0)
VARIANTS: Final = tuple(itertools.starmap(Variant, itertools.product((False, True), (False, True), (0, USUAL_PLACES))))
"""All variants whose kernels differ, except for the longer lines of large beam searches."""


class RowSampler:
    """Samples for the rows of one runner, on one stream."""

    def __init__(
        self,
        rows: DeviceRows,
        capacity: Capacity,
        device: torch.device,
        lines: int | None = None,
        places: int = 1,
    ) -> None:
        """Start without memory for options.

        Args:
            rows: The row table.
            capacity: Most rows of a batch, and the width of the logits.
            device: The GPU.
            lines: Most tokens that a step chooses; None for two of each row, one in a decode and one in a prefill.
            places: Most tokens that a step chooses for a row, one behind the other.
        """
        self._rows, self._capacity, self._device = rows, capacity, device
        self._shaped = ShapedRows(rows, capacity, device, places)
        self.reported = ReportedRows(rows, capacity, device, lines or 2 * capacity.max_rows)
        self.grammars = GrammarRows(capacity, device)
        self.hosts = HostChoices(capacity)
        self.choices: dict[int, Callable[[], Choice]] = {}
        """Functions that choose on the host once the logits are there, by row, in the step that is being enqueued."""
        self._pinned: dict[int, Tensor] = {}
        """Pinned memory for the logits of each row that the host ever chose for. It is kept: if another thread freed it
        while a graph is captured on the stream that wrote it, the capture would fail."""
        self._scratch: dict[Variant, SampleScratch] = {}
        self._last: tuple[NDArray[np.int64], Variant] | None = None
        """Argument of the last call of `variant`, an array that never changes, and its result; reset as rows change."""

    def begin(self) -> None:
        """Begin to enqueue another step."""
        self.choices, self.grammars.forced = {}, {}

    def take(self, plan: StepPlan) -> Sequence[GivenTokens]:
        """Enqueue the options of new rows of `plan`, which the row table has already.

        Returns:
            The tokens that the plan gives, except those for rows whose last token it does not know to be late.

        Raises:
            torch.OutOfMemoryError: These rows are the first with options, and there is no memory for them.
        """
        if plan.new_rows or plan.left_rows:
            self._last = None
        self._shaped.take(plan.new_rows, plan.options)
        self.reported.take(plan.new_rows, plan.options)
        return self.grammars.take(plan)

    def variant(self, rows: NDArray[np.int64]) -> Variant:
        """Return the options that these rows ask for together."""
        if self._last is None or self._last[0] is not rows:
            variant = Variant(
                filtered=bool(self._rows.filtered[rows].any()),
                shaped=bool(self._shaped.asks[rows].any()),
                places=self.reported.places(rows),
                masked=bool(self.grammars.asks[rows].any() or self.hosts.asks[rows].any()),
            )
            self._last = rows, variant
        return self._last[1]

    def act_between(
        self, logits_BV: Tensor, rows: NDArray[np.int64], drafts: DraftsOf | None = None
    ) -> tuple[NDArray[np.int64], dict[int, int]]:
        """Enqueue what the host does between the logits of `rows`, in their order, and the choices from them.

        This waits for the last tokens of rows with grammars and sends their masks, and fetches the logits of rows that
        the host chooses for.

        Args:
            logits_BV: Logits that were just enqueued.
            rows: Rows of the logits' first lines.
            drafts: Waits for the drafts of rows; None where the step has none.

        Returns:
            Indices in `rows` of those to leave out of the choice; and by row, how many of its drafts may be chosen,
            where not all may.

        Raises:
            torch.AcceleratorError: The device failed.
        """
        late: Sequence[int] = ()
        allowed: dict[int, int] = {}
        if self.grammars.asks[rows].any():
            late, allowed = self.grammars.send(rows, self._shaped.arrays().bits_KRW, drafts)
        for line in np.flatnonzero(self.hosts.asks[rows]).tolist():
            row = int(rows[line])
            if row not in self._pinned:
                self._pinned[row] = torch.empty(self._capacity.vocab_size, pin_memory=True)
            self._pinned[row].copy_(logits_BV[line], non_blocking=True)
            self.choices[row] = partial(self.hosts.choice, row, self._pinned[row].numpy())
        return np.flatnonzero(np.isin(rows, late)), allowed

    def close(self) -> None:
        """Join the threads that find masks."""
        self.grammars.close()

    def lines(self, rows: NDArray[np.int64], first: int, ahead: int = 0) -> list[Lines]:
        """Return the lines, if any, that a choice for these rows has just written from line `first` on.

        Args:
            rows: Rows in the order of the batch.
            first: First of their lines.
            ahead: Place of the chosen tokens in the runs that the rows gained.
        """
        places = self.variant(rows).places
        return [self.reported.written(rows, places, first, ahead)] if places else []

    def choose(
        self,
        logits_BV: Tensor,
        rows_B: Tensor,
        positions_B: Tensor,
        ids_B: Tensor,
        variant: Variant,
        *,
        first: int = 0,
        ahead: int = 0,
        pdl: bool = False,
    ) -> None:
        """Enqueue the choice of a token for each row, and store it with the row.

        Args:
            logits_BV: Logits as the model gave them.
            rows_B: int32 row numbers, of which the padding row may come more than once.
            positions_B: Position of each row's input token, int32 or int64.
            ids_B: int32 tensor that ids go to; codes below 0 are those of `NoToken`.
            variant: The options of the rows.
            first: First of the rows' lines of log-probabilities.
            ahead: Place of the chosen tokens in the runs that the rows gain.
            pdl: Whether to use programmatic dependent launch.

        Raises:
            torch.OutOfMemoryError: The variant is new, and there is no memory for what it needs.
        """
        rows, given_BV = self._rows, logits_BV
        if variant.shaped:
            arrays = self._shaped.arrays()
            logits_BV = shape(logits_BV, rows_B, positions_B, rows.pool_RC, arrays, ahead=ahead, pdl=pdl)
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
