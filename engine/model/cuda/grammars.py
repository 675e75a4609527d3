"""`GrammarRows`: the rows on a GPU that a grammar constrains, and the masks that the host finds for their next tokens.

Owns the state of each row's grammar, the threads that find masks and the pinned memory that masks are sent from; never
looks at logits. A mask depends on the tokens before it, which the host has once their step is done. By then the next
step is running, and only its choice waits for the masks that `send` finds meanwhile, in the thread that enqueues such
steps: one for a row's next token, and one behind each of its drafts that the grammar allows. `send` waits little longer
than for the logits: rows whose masks are late are left out.
"""

from __future__ import annotations

import math
import os
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from typing import Final, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from headrace.engine.model.shared.late_rows import LateRows
from headrace.engine.scheduling.plan import Capacity, GivenTokens, StepPlan, Work
from headrace.engine.scheduling.shaping import Grammar, GrammarState

__all__ = ["DraftsOf", "GrammarRows", "TokensOf"]

TokensOf = Callable[[int], Sequence[int]]
"""Function that waits for a launched step and returns the ids that the work with an index chose there.

The last may be a code; there is none if the step failed."""

DraftsOf = Callable[[], Mapping[int, Sequence[int]]]
"""Function that waits for the drafts of the step that is being enqueued and returns them by row."""

_THREADS: Final = 4  # each serves other grammars, so that a slow one does not occupy all
_ROWS_OF_THREAD: Final = 16  # fewer are not spread over more threads
_TURN: Final = 0.0002  # seconds between looks whether the logits are done, while masks are missing


@dataclass(slots=True)
class _Row:
    grammar: Grammar
    completion: list[int]
    """Tokens from which the state starts."""
    end: int
    """Position behind the tokens that are known."""
    jumps: bool
    """Whether forced tokens are wanted."""
    search: Future[None] | None = None
    """Search for the row's latest mask; at first that of the row's former request, which may still write to it."""
    state: GrammarState | None = None
    forced: list[Sequence[int]] = field(default_factory=list)
    """Tokens that are forced where the latest search found a mask: at the next position, and behind drafts."""
    drafts: Sequence[int] = ()
    """Drafts along which the latest search goes."""
    last: tuple[TokensOf, int] | None = None
    """Step that sampled the row's last tokens, and the index of the row's work in that step."""
    given: list[int] = field(default_factory=list)
    """Tokens after the last sampled one that were given, not sampled."""
    is_begun: bool = False
    """Whether the first mask was asked for."""
    was_late: bool = False
    """Whether the latest search was late for its step, and no step has used it yet."""
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
        self.forced: dict[int, Sequence[Sequence[int]]] = {}
        """Tokens that are forced after a row's next one, and after those behind its drafts, by row, in the step that is
        being enqueued."""
        self._patience = 0.0
        """Seconds that the step waits for masks once its logits are there."""
        self._leaving: dict[int, Future[None]] = {}
        """Searches of former requests that may still write to the mask of their row, by row."""
        self._masks_KRW: Tensor | None = None
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
                completion = each.tokens[each.prompt_len :]
                self._rows[each.row] = _Row(each.grammar, completion, len(each.tokens), each.jumps, search)
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

    def send(
        self, rows: NDArray[np.int64], bits_KRW: Tensor, drafts: DraftsOf | None = None
    ) -> tuple[list[int], dict[int, int]]:
        """Wait for the last tokens of those of `rows` that have grammars, find their masks and enqueue the copies.

        There is none behind a draft that the grammar refuses. A row that was late keeps the search that was begun then,
        and may have other drafts by now, behind which there is none either.

        Args:
            rows: Rows of the choice that is enqueued next, behind their logits.
            bits_KRW: int32 masks on the device: bit `i % 32` of word `i // 32` of a row is 1 if the token behind `k` of
                its drafts may be `i`.
            drafts: Waits for the rows' drafts; None where the step has none.

        Returns:
            The rows to leave out, since their masks are late, or were in an earlier step; and of those rows that have
            more drafts than that, the number of drafts behind which there are masks.
        """
        stream = torch.cuda.current_stream()
        self._logits.record(stream)
        if self._masks_KRW is None:
            self._masks_KRW = torch.empty(bits_KRW.shape, dtype=torch.int32, pin_memory=True)
            self._side.wait_stream(stream)  # the stream on which the device's memory was made
        masks_KRW = self._masks_KRW
        asking = rows[self.asks[rows]].tolist()
        held = [row for row in asking if row in self.late]
        wanted = sorted(set(asking).difference(held))
        tokens = self._last_tokens(wanted)
        drafted = {} if drafts is None else drafts()
        self._copied.synchronize()  # already done, unless a step failed, since the tokens came after it
        self._search(tokens, drafted, masks_KRW.numpy())
        late = self._wait(wanted)
        for row in late:
            self.late.hold(row, self._rows[row].end)
            self._rows[row].was_late = True
        ready = sorted(set(wanted).difference(late))
        self._note_forced(ready, masks_KRW.numpy())
        with torch.cuda.stream(self._side):  # beside the logits; no mask is read before these are done
            for ahead, (bits_RW, masks_RW) in enumerate(zip(bits_KRW, masks_KRW, strict=True)):
                lines = [row for row in ready if ahead < max(1, len(self._rows[row].forced))]
                for run in np.split(lines, np.flatnonzero(np.diff(lines) != 1) + 1) if lines else ():
                    some = slice(int(run[0]), int(run[-1]) + 1)
                    bits_RW[some].copy_(masks_RW[some], non_blocking=True)
            self._copied.record(self._side)
        stream.wait_event(self._copied)
        return held + late, self._allowed(ready, drafted)

    def close(self) -> None:
        """Join the threads."""
        if self._threads is not None:
            self._threads.shutdown(cancel_futures=True)

    def _search(
        self, tokens: Mapping[int, Sequence[int]], drafts: Mapping[int, Sequence[int]], masks_KRW: NDArray[np.int32]
    ) -> None:
        """Have threads find the masks of rows that advance by `tokens`, have drafts or have no mask yet."""
        due: dict[Grammar, list[int]] = defaultdict(list)
        for row, more in tokens.items():
            found = self._rows[row]
            is_late = found.was_late
            found.was_late = False
            if more or not found.is_begun or (drafts.get(row) and not is_late):
                due[found.grammar].append(row)
                found.is_begun, found.drafts = True, drafts.get(row, ())
        if not due:
            return
        if self._threads is None:
            self._threads = ThreadPoolExecutor(min(_THREADS, os.cpu_count() or 1), "headrace-masks")
        rows = sum(map(len, due.values()))
        shares: list[list[int]] = [[] for _ in range(min(_THREADS, len(due), -(-rows // _ROWS_OF_THREAD)))]
        for together in sorted(due.values(), key=len, reverse=True):
            min(shares, key=len).extend(together)
        for share in shares:
            asked = [_Asked(self._rows[row], tokens[row], self._rows[row].drafts, row) for row in share]
            before = {each.row.search for each in asked if each.row.search is not None}
            search = self._threads.submit(_find, asked, masks_KRW, before)
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

    def _note_forced(self, rows: Sequence[int], masks_KRW: NDArray[np.int32]) -> None:
        """Note the tokens that are forced after the next ones of `rows`; where a grammar failed, allow no token."""
        for row in rows:
            found = self._rows[row]
            if found.is_broken:
                masks_KRW[0, row], found.forced = 0, []
            elif found.jumps and any(len(each) > 1 for each in found.forced):
                self.forced[row] = [each[1:] for each in found.forced]

    def _allowed(self, rows: Sequence[int], drafts: Mapping[int, Sequence[int]]) -> dict[int, int]:
        """Return how many drafts have masks behind them, for those of `rows` that have more; masks are there."""
        allowed: dict[int, int] = {}
        for row in rows:
            found, wanted = self._rows[row], drafts.get(row, ())
            known = found.drafts[: max(0, len(found.forced) - 1)]
            count = len(os.path.commonprefix([list(wanted), list(known)]))
            if count < len(wanted):
                allowed[row] = count
        return allowed

    def _last_tokens(self, rows: Sequence[int]) -> dict[int, list[int]]:
        """Wait for the last steps of `rows`, and return the tokens that each row's grammar state has not seen."""
        tokens: dict[int, list[int]] = {}
        for row in rows:
            found = self._rows[row]
            tokens[row], found.given = found.given, []
            if found.last is not None:
                (tokens_of, work), found.last = found.last, None
                tokens[row] = [*(id for id in tokens_of(work) if id >= 0), *tokens[row]]
            found.end += len(tokens[row])
        return tokens


class _Asked(NamedTuple):
    """A row whose masks are wanted."""

    row: _Row
    tokens: Sequence[int]
    """Tokens to advance the state by."""
    drafts: Sequence[int]
    line: int
    """Place of the row's masks."""


def _find(asked: Sequence[_Asked], masks_KRW: NDArray[np.int32], before: Collection[Future[None]]) -> None:
    """Find the masks of rows, each after its new tokens and its drafts, once the searches in `before` are done."""
    wait(before)
    try:
        _walk([(each, state) for each in asked if (state := each.row.begin()) is not None], masks_KRW)
    except BaseException:
        for each in asked:
            each.row.is_broken = True


def _walk(asked: Sequence[tuple[_Asked, GrammarState]], masks_KRW: NDArray[np.int32]) -> None:
    """Advance states by new tokens; find masks there and along drafts, up to the first refused; go back from these."""
    for each, _ in asked:
        each.row.forced = []
    going = [(each, state, each.tokens) for each, state in asked]
    for ahead, masks_RW in enumerate(masks_KRW):
        if not going:
            break
        going[0][0].row.grammar.fill([(state, tokens, each.line) for each, state, tokens in going], masks_RW.data)
        for each, state, _ in going:
            each.row.forced.append(state.forced())
        going = [
            (each, state, drafts)
            for each, state, _ in going
            if (drafts := each.drafts[ahead : ahead + 1]) and _allows(masks_RW[each.line], drafts[0])
        ]
    for each, state in asked:
        state.rollback(len(each.row.forced) - 1)


def _allows(mask_W: NDArray[np.int32], token: int) -> bool:
    """Return whether a mask has the bit of `token`."""
    return bool(int(mask_W[token // 32]) >> token % 32 & 1)
