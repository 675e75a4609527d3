"""`Pools`: gathers the hidden states of rows that are pooled, over the chunks of their prompts, on any device.

Owns the sums of rows that are not done; never runs a model and never waits for a device. Next to read: cpu/runner.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from headrace.engine.scheduling.plan import NON_FINITE, StepPlan, Work
from headrace.engine.scheduling.pooling import Pooling

__all__ = ["PoolSpan", "Pools", "settle"]


class PoolSpan(NamedTuple):
    """Consecutive tokens of a step whose hidden states are wanted."""

    work: int
    """Index of the plan's work that computes them."""
    row: int
    first: int
    """Which of the N tokens of the step it begins with."""
    length: int
    ends: bool
    """The last token of the prompt is among them."""

    @property
    def places(self) -> range:
        """Which of the N tokens they are."""
        return range(self.first, self.first + self.length)


class _Row:
    """What one row has gathered so far."""

    def __init__(self, pooling: Pooling, prompt_len: int) -> None:
        self.kind = pooling.kind
        self.prompt_len = prompt_len
        self._sum_E: Tensor | None = None
        self._parts: list[Tensor] = []

    def take(self, hidden_NE: Tensor) -> None:
        """Take in the next tokens."""
        if self.kind != "mean":
            self._parts.append(hidden_NE)
            return
        sum_E = hidden_NE.sum(0, dtype=torch.float32)
        self._sum_E = sum_E if self._sum_E is None else self._sum_E + sum_E

    def result(self) -> Tensor:
        """[E] float32, or all hidden states: what the decoder made, unless it took several chunks."""
        if self._sum_E is not None:
            return self._sum_E / self.prompt_len
        if self.kind == "last":
            return self._parts[-1][-1].float()
        return self._parts[0] if len(self._parts) == 1 else torch.cat(self._parts)


class Pools:
    """The rows that are pooled."""

    def __init__(self) -> None:
        """Start with none."""
        self._rows: dict[int, _Row] = {}

    def update(self, plan: StepPlan) -> None:
        """Take in what the plan's new rows want, and forget what these rows wanted before."""
        if self._rows:
            for new in plan.new_rows:
                self._rows.pop(new.row, None)
        for options in plan.options:
            if options.pooling is not None:
                self._rows[options.row] = _Row(options.pooling, options.prompt_len)

    def span(self, index: int, work: Work, first: int) -> PoolSpan | None:
        """What is wanted of a work, whose tokens are those of the step from `first`; None if nothing."""
        row = self._rows.get(work.row)
        if row is None:
            return None
        ends = work.start + work.num_tokens == row.prompt_len
        if row.kind != "last":
            return PoolSpan(index, work.row, first, work.num_tokens, ends)
        return PoolSpan(index, work.row, first + work.num_tokens - 1, 1, True) if ends else None

    def pool(self, spans: Sequence[PoolSpan], hidden_PE: Tensor) -> dict[int, Tensor]:
        """Take in the hidden states of a step.

        Args:
            spans: What was wanted of it.
            hidden_PE: Their tokens, one span after the other.

        Returns:
            Index of a work -> what its request wanted, for those that end here.
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


def settle(pooled: dict[int, Tensor], tokens: list[int]) -> dict[int, Any]:
    """What a step returns of `pooled`: vectors become arrays, and a work whose vector is not finite says so.

    Args:
        pooled: As `Pools.pool` returns it; vectors are in host memory and done.
        tokens: What the step returns for each work, changed in place.
    """
    settled: dict[int, Any] = {}
    for work, value in pooled.items():
        settled[work] = value if value.dim() > 1 else value.numpy().copy()  # its memory may serve another step
        if value.dim() == 1 and not bool(value.isfinite().all()):
            tokens[work] = NON_FINITE
    return settled
