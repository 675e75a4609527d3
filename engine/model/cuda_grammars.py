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

    def go_on(self, token: int | None) -> tuple[GrammarState, int] | None:
        """Where the row stands, and a token that it has still to go on with, if there is one."""
        if self.state is None:
            self.state = self.grammar.begin(self.completion)
        if not self.given:
            return None if token is None else (self.state, token)
        for each in self.given if token is None else (token, *self.given):
            self.state.advance(each)
        self.given = []
        return None


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
        due: list[tuple[GrammarState, int]] = []
        for row, token in self._last_tokens(rows).items():
            found = self._rows[row]
            try:
                if not found.failed and (one := found.go_on(token)) is not None:
                    due.append(one)
            except Exception:
                found.failed = True
        ready = [(state, row) for row in rows if (state := self._rows[row].state) and not self._rows[row].failed]
        if ready:
            grammar = self._rows[ready[0][1]].grammar
            try:
                if due:
                    grammar.advance_all(due)
                grammar.fill(ready, masks_RW.data)
            except Exception:
                for _, row in ready:
                    self._rows[row].failed = True
        for row in rows:
            found = self._rows[row]
            if found.failed:
                masks_RW[row] = 0
            elif found.jumps and found.state is not None and len(forced := found.state.forced()) > 1:
                self.forced[row] = forced[1:]

    def _last_tokens(self, rows: Sequence[int]) -> dict[int, int | None]:
        """The token of each row that its state does not know yet, None where there is none; waits for their steps."""
        tokens: dict[int, int | None] = {}
        known: dict[TokensOf, Sequence[int] | None] = {}
        for row in rows:
            found = self._rows[row]
            tokens[row] = None
            if found.last is not None:
                (tokens_of, work), found.last = found.last, None
                if tokens_of not in known:
                    known[tokens_of] = tokens_of()
                ids = known[tokens_of]
                tokens[row] = None if ids is None or ids[work] < 0 else ids[work]
        return tokens
