"""`CudaDrafts`: what the graphs of decode steps do besides, where rows compute drafts: guess, lay out, verify, append.

Owns the tensors between these; never computes a logit, and never decides which rows run or how deep. Next to read:
drafter.py, and ops/cuda/drafts/accept.py.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Final, NamedTuple, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from headrace.engine.model.cuda.drafting.drafter import CudaDrafter, Decoded, RowTable
from headrace.engine.model.cuda.grammars import DraftsOf
from headrace.engine.model.cuda.rows import DeviceRows
from headrace.engine.model.cuda.sampling import RowSampler, Variant
from headrace.engine.model.network.decoder import HiddenStates
from headrace.engine.model.spec import MixerSpec
from headrace.engine.scheduling.plan import Capacity
from headrace.ops.cuda.attention.steps import CudaKv, CudaStep
from headrace.ops.cuda.drafts.accept import HEAD, Appended, accept, choose_and_accept
from headrace.ops.cuda.drafts.lines import prepare_lines
from headrace.ops.cuda.fused import DecodeInputs
from headrace.ops.cuda.sampling.sample import Asks, SampleScratch
from headrace.ops.paged import PageShape

__all__ = ["MOST_LINES", "ChangeDrafts", "CudaDrafts", "OpenDrafts", "depths", "most_lines", "most_words"]

MOST_LINES: Final = 1024
"""Most lines of a step with drafts: from there on, products take as long as their multiplications, and drafts gain
next to nothing; and logits are wide."""
_DEPTHS: Final = (1, 2, 4, 8, 16)
"""Depths that have graphs, beside the largest."""


class OpenDrafts(NamedTuple):
    """How one engine's drafts are made."""

    open: Callable[[RowTable], CudaDrafter]
    """Makes what guesses for the rows of one runner."""
    most: int
    """Largest number of drafts of a row in one step."""
    pages: Sequence[PageShape | int] = ()
    """Pages of the drafter's own layers, as `page_shapes` returns them; they lie behind those of the model."""
    rates: tuple[float, ...] = ()
    """For benchmarks: at each place, the share of drafts behind right ones that count as right, whatever they are; else
    empty. Rows that choose one place after the other do without."""


ChangeDrafts: TypeAlias = Callable[[OpenDrafts], OpenDrafts]
"""For benchmarks: changes how the drafts of an engine are made before it opens."""


def depths(most: int) -> list[int]:
    """Return the depths of an engine's graphs of up to `most` drafts a row, in rising order; 0 is not among them."""
    return [*(depth for depth in _DEPTHS if depth < most), most]


def most_lines(max_rows: int, most: int) -> int:
    """Return how many lines the largest step has, in an engine of up to `max_rows` rows and `most` drafts a row."""
    return max(max_rows, min(MOST_LINES, max_rows * (most + 1)))


def most_words(max_rows: int, most: int) -> int:
    """Return how many words the answer of the largest step has: a count of drafts, one of tokens, and these."""
    return most_lines(max_rows, most) + (HEAD * max_rows if most else 0)


class CudaDrafts:
    """Drafts of one runner's rows, all on one stream."""

    def __init__(
        self,
        wanted: OpenDrafts,
        rows: DeviceRows,
        sampler: RowSampler,
        capacity: Capacity,
        kv: CudaKv,
    ) -> None:
        """Allocate for the largest step.

        Args:
            wanted: What guesses, and how many tokens.
            rows: The row table.
            sampler: The sampler of these rows.
            capacity: Most rows of a step, and the width of the logits.
            kv: The pages of each layer.
        """
        self.most, self._rows, self._sampler, self._capacity = wanted.most, rows, sampler, capacity
        self._device = device = kv[0].device
        self.lines = most_lines(capacity.max_rows, self.most)
        """Most lines of a step."""
        pages = rows.read_R, rows.table_RP, rows.pages, kv
        self._asks = Asks(rows.temperature_R, rows.top_k_R, rows.top_p_R, rows.min_p_R, rows.seed_R)
        self.drafter = wanted.open(RowTable(rows.pool_RC, rows.lengths_R, rows.most_R, *pages, self.lines, self._asks))
        size = capacity.max_rows

        def words(count: int) -> Tensor:
            return torch.zeros(count, dtype=torch.int32, device=device)

        self._line_rows, self._counts, self._ids = words(self.lines), words(size), words(size)
        self._going, self._places = words(size), words(size)
        self._ones = torch.ones_like(self._going)
        self._runs = words(self.lines + HEAD * size)
        self._sent_2L = torch.empty(2, self.lines, dtype=torch.int32, pin_memory=True)
        """Tokens and rows of the lines of the latest step that `send` was called for."""
        self._sent = torch.cuda.Event(blocking=True)
        self._logits_LV: Tensor | None = None
        self._rates = torch.tensor(wanted.rates, device=device) if wanted.rates else None
        self._scratch: dict[bool, SampleScratch] = {}
        self._appended = Appended(rows.pool_RC, rows.lengths_R, rows.stops_RS, rows.stopped_R)

    def depths(self, bucket: int) -> list[int]:
        """Return the depths of the graphs for steps of `bucket` rows, in rising order; 0 is not among them."""
        return [depth for depth in depths(self.most) if bucket * (depth + 1) <= self.lines]

    def depth_of(self, wanted: int, bucket: int) -> int:
        """Return the depth of the graph for a step of `bucket` rows with up to `wanted` drafts each; 0 for none."""
        fitting = self.depths(bucket) if wanted else []
        return next((depth for depth in fitting if depth >= wanted), max(fitting, default=0))

    def line_rows(self, bucket: int, depth: int) -> Tensor:
        """Return the row of each line of a step, int32, in the memory that `prepare` writes."""
        return self._line_rows[: bucket * (depth + 1)]

    def take_up(
        self, bucket: int, depth: int, inputs: DecodeInputs, steps: Mapping[MixerSpec, CudaStep], states: HiddenStates
    ) -> None:
        """Enqueue what the drafter keeps of the step that has just chosen its tokens, of any depth.

        Args:
            bucket: Number of rows of the step.
            depth: Most drafts that it computed for a row.
            inputs: Inputs of its lines.
            steps: Their places in the cache, by mixer of the model.
            states: Hidden states of its lines, with the inputs of the layers that `CudaDrafter.taps` names.
        """
        active_B = self._rows.active_R[:bucket]
        line_rows_L, counts_B = active_B, self._ones[:bucket]
        if depth:
            line_rows_L, counts_B = self.line_rows(bucket, depth), self._runs_of(bucket, depth)[:, 1]
        self.drafter.take_up(Decoded(depth, active_B, inputs, line_rows_L, counts_B, steps, states))

    def prepare(self, bucket: int, depth: int, inputs: DecodeInputs, page_size: int) -> None:
        """Enqueue the beginning of a step: what the host changes of rows, the drafts, and the inputs of its lines."""
        self._rows.apply()
        rows, counts_B = self._rows, self._counts[:bucket]
        active_B = rows.active_R[:bucket]
        self.drafter.draft(active_B, depth, counts_B)
        prepare_lines(
            active_B, counts_B, rows.most_R, rows.pool_RC, rows.lengths_R, rows.table_RP,
            self.line_rows(bucket, depth), inputs, depth=depth, page_size=page_size,
        )  # fmt: skip

    def send(self, rows: NDArray[np.int64], bucket: int, depth: int, inputs: DecodeInputs) -> DraftsOf:
        """Enqueue the copy of the drafts to the host; return what waits for them. Only the latest call's can be read.

        Args:
            rows: Rows of the step, in the order of the batch.
            bucket: Number of rows with padding.
            depth: Largest number of drafts of a row.
            inputs: Inputs of the lines, as `prepare` wrote them.
        """
        lines = bucket * (depth + 1)
        for here_L, there_L in zip(self._sent_2L, (inputs.tokens_B, self.line_rows(bucket, depth)), strict=True):
            here_L[:lines].copy_(there_L[:lines], non_blocking=True)
        self._sent.record()
        return partial(self._read, rows, depth)

    def _read(self, rows: NDArray[np.int64], depth: int) -> dict[int, list[int]]:
        """Wait for what `send` sent; return the drafts of each row that has some."""
        self._sent.synchronize()
        tokens_BK, rows_BK = self._sent_2L[:, : len(rows) * (depth + 1)].numpy().reshape(2, len(rows), depth + 1)
        counts = (rows_BK[:, 1:] == rows[:, None]).sum(1).tolist()
        each = zip(rows.tolist(), counts, tokens_BK[:, 1:].tolist(), strict=True)
        return {row: drafts[:count] for row, count, drafts in each if count}

    def allow(self, rows: NDArray[np.int64], depth: int, allowed: Mapping[int, int]) -> None:
        """Enqueue, before the choice, that some of a step's `rows` have so many drafts and no more."""
        first = (depth + 1) * np.arange(len(rows))
        lines = [
            np.arange(at + 1 + allowed[row], at + 1 + depth)
            for at, row in zip(first.tolist(), rows.tolist(), strict=True)
            if row in allowed
        ]
        places = np.concatenate(lines)
        self._rows.send(self._line_rows, places, np.full(len(places), self._rows.padding_row, np.int32))

    def keep(self, logits_LV: Tensor) -> Tensor:
        """Enqueue the copy of a step's logits to where they stay until the next such step; return them there.

        They are too wide to be kept for each graph.
        """
        if self._logits_LV is None:  # before any capture, which a run without one precedes
            self._logits_LV = logits_LV.new_empty(self.lines, logits_LV.shape[1])
        return self._logits_LV[: len(logits_LV)].copy_(logits_LV)

    def choose(
        self, logits_LV: Tensor, bucket: int, depth: int, inputs: DecodeInputs, variant: Variant, *, pdl: bool
    ) -> Tensor:
        """Enqueue the choice of tokens behind the lines, as far as drafts are right; return the words of all runs.

        Raises:
            torch.OutOfMemoryError: The variant is new, and there is no memory for what it needs.
        """
        runs_BW, logits_LV = self._runs_of(bucket, depth), logits_LV[: bucket * (depth + 1)]
        if variant.shaped or variant.places:
            self._choose_by_place(logits_LV, bucket, depth, inputs, variant, runs_BW, pdl=pdl)
        else:
            choose_and_accept(
                logits_LV, self._rows.active_R[:bucket], self.line_rows(bucket, depth), inputs, self._asks,
                self._appended, runs_BW, self._scratch_for(filtered=variant.filtered), filtered=variant.filtered,
                pdl=pdl, rates_K=self._rates,
            )  # fmt: skip
        return runs_BW.view(-1)

    def _choose_by_place(
        self,
        logits_LV: Tensor,
        bucket: int,
        depth: int,
        inputs: DecodeInputs,
        variant: Variant,
        runs_BW: Tensor,
        *,
        pdl: bool,
    ) -> None:
        """Choose at one place of all rows after the other, as if each were a step of its own.

        Penalties count the drafts before a place, which are tokens of the rows that choose there.
        """
        going_B, places_B, ids_B = self._going[:bucket], self._places[:bucket], self._ids[:bucket]
        line_rows_L, rows = self.line_rows(bucket, depth), self._rows
        active_B, stopped_R = rows.active_R[:bucket], rows.stopped_R
        for ahead in range(depth + 2):
            accept(ahead, active_B, line_rows_L, inputs, ids_B, going_B, places_B, stopped_R, runs_BW)
            if ahead <= depth:
                logits_BV = logits_LV[ahead :: depth + 1]
                first = ahead * bucket
                self._sampler.choose(logits_BV, going_B, places_B, ids_B, variant, first=first, ahead=ahead, pdl=pdl)

    def _runs_of(self, bucket: int, depth: int) -> Tensor:
        return self._runs[: bucket * (HEAD + depth + 1)].view(bucket, -1)

    def _scratch_for(self, *, filtered: bool) -> SampleScratch:
        if filtered not in self._scratch:
            self._scratch[filtered] = SampleScratch(
                self.lines, self._capacity.vocab_size, self._device,
                dtype=torch.float32, filters=filtered, filter_rows=self._capacity.max_rows,
            )  # fmt: skip
        return self._scratch[filtered]
