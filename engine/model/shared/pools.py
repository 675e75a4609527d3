"""`Pools`: gathers the hidden states of rows that are pooled, over the chunks of their prompts, on any device.

Owns the sums of rows that are not done; never runs a model and never waits for a device. Next to read: cpu/runner.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from headrace.engine.scheduling.plan import StepPlan, Work
from headrace.engine.scheduling.pooling import Pooling

__all__ = ["PoolSpan", "Pools"]


class PoolSpan(NamedTuple):
    """Consecutive tokens of a step whose hidden states are wanted."""

    work: int
    """Index of the plan's work that computes them."""
    row: int
    first: int
    """Index of the span's first token among the N of the step."""
    length: int
    ends: bool
    """Whether the last token of the prompt is in the span."""

    @property
    def places(self) -> range:
        """Indices of the span's tokens among the N of the step."""
        return range(self.first, self.first + self.length)


class _Row:
    """The hidden states that one row has gathered so far."""

    def __init__(self, pooling: Pooling, prompt_len: int) -> None:
        self.kind = pooling.kind
        self.prompt_len = prompt_len
        self._sum_E: Tensor | None = None
        self._parts: list[Tensor] = []

    def take(self, hidden_NE: Tensor) -> None:
        """Add the hidden states of the row's next tokens."""
        if self.kind != "mean":
            self._parts.append(hidden_NE)
            return
        sum_E = hidden_NE.sum(0, dtype=torch.float32)
        self._sum_E = sum_E if self._sum_E is None else self._sum_E + sum_E

    def result(self) -> Tensor:
        """Return the pooled [E] float32, or all hidden states: the decoder's own tensor if there was only one chunk."""
        if self._sum_E is not None:
            return self._sum_E / self.prompt_len
        if self.kind == "last":
            return self._parts[-1][-1].float()
        return self._parts[0] if len(self._parts) == 1 else torch.cat(self._parts)


class Pools:
    """The rows whose hidden states are pooled."""

    def __init__(self) -> None:
        """Start without rows."""
        self._rows: dict[int, _Row] = {}

    def update(self, plan: StepPlan) -> None:
        """Add the plan's new rows that pool, and forget what its rows gathered for former requests."""
        if self._rows:
            for new in plan.new_rows:
                self._rows.pop(new.row, None)
        for options in plan.options:
            if options.pooling is not None:
                self._rows[options.row] = _Row(options.pooling, options.prompt_len)

    def span(self, index: int, work: Work, first: int) -> PoolSpan | None:
        """Return the tokens of `work` whose hidden states are wanted, or None; `first` is its first in the step."""
        row = self._rows.get(work.row)
        if row is None:
            return None
        ends = work.start + work.num_tokens == row.prompt_len
        if row.kind != "last":
            return PoolSpan(index, work.row, first, work.num_tokens, ends)
        return PoolSpan(index, work.row, first + work.num_tokens - 1, 1, True) if ends else None

    def pool(self, spans: Sequence[PoolSpan], hidden_PE: Tensor) -> dict[int, Tensor]:
        """Add the hidden states of a step to the rows' own.

        Args:
            spans: The spans of the step.
            hidden_PE: Hidden states of the spans' tokens, one span after the other.

        Returns:
            The pooled result of each prompt that ends in this step, by index of its work.
        """
        pooled = {}
        start = 0
        for span in spans:
            row = self._rows[span.row]
            row.take(hidden_PE[start : start + span.length])
            start += span.length
            if span.ends:
                pooled[span.work] = row.result()
                del self._rows[span.row]
        return pooled
