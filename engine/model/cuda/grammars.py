"""`GrammarRows`: the rows on a GPU that a grammar constrains, and the masks that the host finds for their next tokens.

Owns the state of each row's grammar, the threads that find masks and the pinned memory that masks are sent from; never
looks at logits. A mask depends on the token before it, which the host has once the step of that token is done. By then
the next step is running, and only its choice waits for the masks that `send` finds meanwhile, in the thread that
enqueues such steps. `send` waits little longer than for the logits: rows whose masks are late are left out.
"""

from __future__ import annotations

import math
import os
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from headrace.engine.model.shared.late_rows import LateRows
from headrace.engine.scheduling.plan import Capacity, GivenTokens, StepPlan, Work
from headrace.engine.scheduling.shaping import Grammar, GrammarState

__all__ = ["GrammarRows", "TokensOf"]

TokensOf = Callable[[], Sequence[int] | None]
"""Function that waits for a launched step and returns its ids, one for each work; None if the step failed."""

_THREADS: Final = 4  # each serves other grammars, so that a slow one does not occupy all
_ROWS_OF_THREAD: Final = 16  # fewer are not spread over more threads
_TURN: Final = 0.0002  # seconds between looks whether the logits are done, while masks are missing


@dataclass(slots=True)
class _Row:
    grammar: Grammar
    completion: list[int]
    """Tokens from which the state starts."""
    jumps: bool
    """Whether forced tokens are wanted."""
    search: Future[None] | None = None
    """Search for the row's latest mask; at first that of the row's former request, which may still write to it."""
    state: GrammarState | None = None
    last: tuple[TokensOf, int] | None = None
    """Step that sampled the row's last token, and the index of the row's work in that step."""
    given: list[int] = field(default_factory=list)
    """Tokens after the last sampled one that were given, not sampled."""
    is_begun: bool = False
    """Whether the first mask was asked for."""
    is_broken: bool = False

    def begin(self) -> GrammarState | None:
        """Return the grammar's state, made in the thread that finds the mask; None if it cannot be made."""
        if self.state is None and not self.is_broken:
            try:
                self.state = self.grammar.begin(self.completion)
            except BaseException:  # the library panics with errors that are no Exception
                self.is_broken = True
        return self.state

    @property
    def is_ready(self) -> bool:
        return self.search is not None and self.search.done()


class GrammarRows:
    """The rows that are constrained by a grammar."""

    def __init__(self, capacity: Capacity, device: torch.device) -> None:
        """Start without rows, threads or memory.

        Args:
            capacity: Most rows.
            device: The GPU that masks are sent to.
        """
        self.asks = np.zeros(capacity.max_rows + 1, np.bool_)
        """Whether each row is constrained by a grammar, bool [rows]."""
        self.late = LateRows()
        self._rows: dict[int, _Row] = {}
        self.forced: dict[int, Sequence[int]] = {}
        """Tokens that are forced after a row's next one, by row, in the step that is being enqueued."""
        self._patience = 0.0
        """Seconds that the step waits for masks once its logits are there."""
        self._leaving: dict[int, Future[None]] = {}
        """Searches of former requests that may still write to the mask of their row, by row."""
        self._masks_RW: Tensor | None = None
        self._side = torch.cuda.Stream(device)
        self._copied, self._logits = torch.cuda.Event(), torch.cuda.Event()
        self._threads: ThreadPoolExecutor | None = None

    def take(self, plan: StepPlan) -> Sequence[GivenTokens]:
        """Apply the rows and options of `plan`; return the tokens that it gives to rows."""
        given = self.late.take(plan)
        if self._rows:
            for row in (*plan.left_rows, *(new.row for new in plan.new_rows)):
                if (left := self._rows.pop(row, None)) is not None and left.search is not None:
                    self._leaving[row] = left.search
                self.asks[row] = False
        for each in plan.options:
            if each.grammar is not None:
                search = self._leaving.pop(each.row, None)
                self._rows[each.row] = _Row(each.grammar, each.tokens[each.prompt_len :], each.jumps, search)
                self.asks[each.row] = True
        if self._rows:
            for row, _, tokens in given:
                if self.asks[row]:
                    self._rows[row].given += tokens
            rows = [*plan.rows, *(work.row for work in plan.others)]
            self._patience = LateRows.patience(plan, others=not self.asks[rows].all())
        return given

    def sampled(self, tokens_of: TokensOf, works: Iterable[Work]) -> None:
        """Note that a step, just enqueued, samples the next tokens of rows with grammars."""
        if self._rows:
            for index, work in enumerate(works):
                row = self._rows.get(work.row)
                if work.samples and row is not None and work.row not in self.late:
                    row.last = tokens_of, index

    def send(self, rows: NDArray[np.int64], places: NDArray[np.int64], bits_RW: Tensor) -> list[int]:
        """Wait for the last tokens of those of `rows` that have grammars, find their masks and enqueue the copies.

        Args:
            rows: Rows of the choice that is enqueued next, behind their logits.
            places: The positions of the tokens that are chosen.
            bits_RW: int32 masks on the device: bit `i % 32` of word `i // 32` is 1 if a row's next token may be `i`.

        Returns:
            The rows to leave out, since their masks are late, or were in an earlier step.
        """
        stream = torch.cuda.current_stream()
        self._logits.record(stream)
        if self._masks_RW is None:
            self._masks_RW = torch.empty(bits_RW.shape, dtype=torch.int32, pin_memory=True)
            self._side.wait_stream(stream)  # the stream on which the device's memory was made
        masks_RW = self._masks_RW
        asking = np.flatnonzero(self.asks[rows])
        place_of = dict(zip(rows[asking].tolist(), places[asking].tolist(), strict=True))
        held = [row for row in place_of if row in self.late]
        wanted = sorted(place_of.keys() - held)
        tokens = self._last_tokens(wanted)
        self._copied.synchronize()  # already done, unless a step failed, since the tokens came after it
        self._search(tokens, masks_RW.numpy())
        late = self._wait(wanted)
        for row in late:
            self.late.hold(row, place_of[row])
        ready = sorted(set(wanted).difference(late))
        self._note_forced(ready, masks_RW.numpy())
        with torch.cuda.stream(self._side):  # beside the logits; no mask is read before these are done
            for run in np.split(ready, np.flatnonzero(np.diff(ready) != 1) + 1) if ready else ():
                some = slice(int(run[0]), int(run[-1]) + 1)
                bits_RW[some].copy_(masks_RW[some], non_blocking=True)
            self._copied.record(self._side)
        stream.wait_event(self._copied)
        return held + late

    def close(self) -> None:
        """Join the threads."""
        if self._threads is not None:
            self._threads.shutdown(cancel_futures=True)

    def _search(self, tokens: Mapping[int, Sequence[int]], masks_RW: NDArray[np.int32]) -> None:
        """Have threads find the masks of rows that advance by `tokens`, or that have no mask yet."""
        due: dict[Grammar, list[int]] = defaultdict(list)
        for row, more in tokens.items():
            found = self._rows[row]
            if more or not found.is_begun:
                due[found.grammar].append(row)
                found.is_begun = True
        if not due:
            return
        if self._threads is None:
            self._threads = ThreadPoolExecutor(min(_THREADS, os.cpu_count() or 1), "headrace-masks")
        rows = sum(map(len, due.values()))
        shares: list[list[int]] = [[] for _ in range(min(_THREADS, len(due), -(-rows // _ROWS_OF_THREAD)))]
        for together in sorted(due.values(), key=len, reverse=True):
            min(shares, key=len).extend(together)
        for share in shares:
            asked = [(self._rows[row], tokens[row], row) for row in share]
            before = {found.search for found, _, _ in asked if found.search is not None}
            search = self._threads.submit(_find, asked, masks_RW, before)
            for row in share:
                self._rows[row].search = search

    def _wait(self, rows: Sequence[int]) -> list[int]:
        """Wait for the masks of `rows` until shortly after the logits are there; return the rows without."""
        ends = math.inf
        while True:
            if ends == math.inf and self._logits.query():
                ends = time.monotonic() + self._patience
            wait({search for row in rows if (search := self._rows[row].search) is not None}, _TURN)
            missing = [row for row in rows if not self._rows[row].is_ready]
            if not missing or time.monotonic() > ends:
                return missing

    def _note_forced(self, rows: Sequence[int], masks_RW: NDArray[np.int32]) -> None:
        """Note the tokens that are forced after the next ones of `rows`; where a grammar failed, allow no token."""
        for row in rows:
            found = self._rows[row]
            if found.is_broken:
                masks_RW[row] = 0
            elif found.jumps and found.state is not None and len(forced := found.state.forced()) > 1:
                self.forced[row] = forced[1:]

    def _last_tokens(self, rows: Sequence[int]) -> dict[int, list[int]]:
        """Wait for the last steps of `rows`, and return the tokens that each row's grammar state has not seen."""
        tokens: dict[int, list[int]] = {}
        known: dict[TokensOf, Sequence[int] | None] = {}
        for row in rows:
            found = self._rows[row]
            tokens[row], found.given = found.given, []
            if found.last is not None:
                (tokens_of, work), found.last = found.last, None
                if tokens_of not in known:
                    known[tokens_of] = tokens_of()
                ids = known[tokens_of]
                if ids is not None and ids[work] >= 0:
                    tokens[row] = [ids[work], *tokens[row]]
        return tokens


def _find(
    rows: Sequence[tuple[_Row, Sequence[int], int]], masks_RW: NDArray[np.int32], before: Collection[Future[None]]
) -> None:
    """Find the masks of `rows`, each after its new tokens, once the searches in `before` are done."""
    wait(before)
    asked = [(state, tokens, line) for row, tokens, line in rows if (state := row.begin()) is not None]
    try:
        rows[0][0].grammar.fill(asked, masks_RW.data)
    except BaseException:
        for row, _, _ in rows:
            row.is_broken = True
