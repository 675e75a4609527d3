"""`GrammarRows`: which rows of a CUDA engine keep to a grammar, and the masks that the host finds for their choices.

Owns each row's place in its grammar and the pinned memory that masks are sent from; never looks at logits. A mask needs
the token before it, which the host has once the step of that token is done. By then the next step computes already, and
only its choice waits for what `send` finds meanwhile. All of it happens in the thread that enqueues such steps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from headrace.engine.scheduling.plan import Capacity, GivenTokens, StepPlan, Work
from headrace.engine.scheduling.shaping import Grammar, GrammarState

__all__ = ["GrammarRows", "TokensOf"]

TokensOf = Callable[[], Sequence[int] | None]
"""Waits for a launched step and gives its ids, one for each work; None if the step failed."""


@dataclass(slots=True)
class _Row:
    grammar: Grammar
    completion: list[int]
    """What the state begins with."""
    state: GrammarState | None = None
    last: tuple[TokensOf, int] | None = None
    """The step that sampled its last token, and which of that step's works it was."""
    jumps: bool = False
    """Whether anybody wants to know of forced tokens."""
    given: list[int] = field(default_factory=list)
    """Tokens behind its last that were not sampled."""
    failed: bool = False

    def last_token(self) -> int | None:
        """The token that its state does not know yet; waits for its step."""
        if self.last is None:
            return None
        (tokens_of, work), self.last = self.last, None
        tokens = tokens_of()
        return None if tokens is None or tokens[work] < 0 else tokens[work]

    def advanced(self, token: int | None) -> GrammarState:
        """Where the row stands after all tokens that it has."""
        if self.state is None:
            self.state = self.grammar.begin(self.completion)
        given, self.given = self.given, []
        for each in given if token is None else (token, *given):
            self.state.advance(each)
        return self.state


class GrammarRows:
    """The rows that keep to a grammar."""

    def __init__(self, capacity: Capacity, device: torch.device) -> None:
        """Start with none, and no memory.

        Args:
            capacity: Rows.
            device: Where masks are sent.
        """
        self.asks = np.zeros(capacity.max_rows + 1, np.bool_)
        """Whether a row keeps to a grammar."""
        self._rows: dict[int, _Row] = {}
        self.forced: dict[int, Sequence[int]] = {}
        """Of the step that is being enqueued: the tokens that must follow a row's next."""
        self._masks_RW: Tensor | None = None
        self._side = torch.cuda.Stream(device)
        self._copied = torch.cuda.Event()

    def take(self, plan: StepPlan) -> None:
        """Take in what new rows ask, and forget what these and those that were left kept to before."""
        self.forced = {}
        if self._rows:
            for row in (*plan.left_rows, *(new.row for new in plan.new_rows)):
                self._rows.pop(row, None)
                self.asks[row] = False
        for each in plan.options:
            if each.grammar is not None:
                self._rows[each.row] = _Row(each.grammar, each.tokens[each.prompt_len :], jumps=each.jumps)
                self.asks[each.row] = True

    def give(self, given: Sequence[GivenTokens]) -> None:
        """Take in tokens that were not sampled."""
        for row, _, tokens in given:
            if self.asks[row]:
                self._rows[row].given += tokens

    def sampled(self, tokens_of: TokensOf, works: Iterable[Work]) -> None:
        """Note that a step, just enqueued, samples the next tokens of rows that keep to a grammar."""
        if self._rows:
            for index, work in enumerate(works):
                if work.samples and (row := self._rows.get(work.row)) is not None:
                    row.last = tokens_of, index

    def send(self, rows: NDArray[np.int64], bits_RW: Tensor) -> None:
        """Wait for the last tokens of those of `rows` that keep to a grammar, find their masks and enqueue the copies.

        Args:
            rows: Of a choice that is enqueued next.
            bits_RW: int32 on the device: bit `i % 32` of word `i // 32` says whether a row's next token may be `i`.
        """
        wanted = np.sort(rows[self.asks[rows]])
        if not len(wanted):
            return
        stream = torch.cuda.current_stream()
        if self._masks_RW is None:
            self._masks_RW = torch.empty(bits_RW.shape, dtype=torch.int32, pin_memory=True)
            self._side.wait_stream(stream)  # on which the device's memory was made
        masks_RW = self._masks_RW
        self._copied.synchronize()  # it was done before the tokens were, but for a step that failed
        self._find(wanted.tolist(), masks_RW.numpy())
        with torch.cuda.stream(self._side):  # beside the logits; nobody reads a row's mask before they are done
            for run in np.split(wanted, np.flatnonzero(np.diff(wanted) != 1) + 1):
                some = slice(int(run[0]), int(run[-1]) + 1)
                bits_RW[some].copy_(masks_RW[some], non_blocking=True)
            self._copied.record(self._side)
        stream.wait_event(self._copied)

    def _find(self, rows: Sequence[int], masks_RW: NDArray[np.int32]) -> None:
        """The masks of some rows; no token is allowed where the grammar failed, which is that row's own trouble."""
        ready: list[tuple[GrammarState, int]] = []
        for row in rows:
            found = self._rows[row]
            token = found.last_token()
            if not found.failed:
                try:
                    state = found.advanced(token)
                    if found.jumps and len(forced := state.forced()) > 1:
                        self.forced[row] = forced[1:]
                    ready.append((state, row))
                except Exception:
                    found.failed = True
            if found.failed:
                masks_RW[row] = 0
        if ready:
            self._rows[ready[0][1]].grammar.fill(ready, masks_RW.data)
