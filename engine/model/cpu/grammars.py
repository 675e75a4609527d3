"""`CpuMasks`: finds the tokens that the grammars of rows allow next, in a thread while the model computes.

Owns that thread, the state of each row's grammar and the rows whose masks were late; never looks at logits.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Final

import numpy as np
from numpy.typing import NDArray

from headrace.engine.model.shared.draft_masks import masks_behind
from headrace.engine.model.shared.late_rows import LateRows
from headrace.engine.scheduling.shaping import Grammar, GrammarState

__all__ = ["CpuMasks"]

_Banned = NDArray[np.bool_]
_Found = list[tuple[_Banned, Sequence[int]]]
"""Mask of banned tokens and forced tokens at a row's next position, and behind each draft that the grammar allows."""
_IN_TIME: Final = 0.001  # seconds after the logits


class CpuMasks:
    """The rows that are constrained by a grammar."""

    def __init__(self, vocab_size: int) -> None:
        """Start without rows; the first one starts the thread."""
        self._vocab_size = vocab_size
        self._thread: ThreadPoolExecutor | None = None
        self._rows: dict[int, _Row] = {}
        self.late = LateRows()

    def __contains__(self, row: int) -> bool:
        return row in self._rows

    def begin(self, row: int, grammar: Grammar, tokens: Sequence[int], *, jumps: bool) -> None:
        """Constrain `row`, whose completion so far is `tokens`, by `grammar`; find forced tokens only with `jumps`."""
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, "headrace-masks")
        self._rows[row] = made = _Row(self._vocab_size, jumps)
        made.found = self._thread.submit(made.begin, grammar, tokens)

    def missing(self, rows: Sequence[int], patience: float) -> list[int]:
        """Wait about `patience` seconds at most for the masks of `rows`; return the rows whose masks are missing."""
        searches = [self._rows[row].found for row in rows]
        _, missing = wait(searches, None if patience == math.inf else patience + _IN_TIME)
        return [row for row, search in zip(rows, searches, strict=True) if search in missing]

    def banned_V(self, row: int) -> _Banned:
        """Return the bool [V] mask of tokens that may not come next; waits for it. All True if the grammar failed."""
        found = self._rows[row]
        if found.found.exception() is not None:  # a failure of this row alone: the step and its other rows go on
            return np.ones(self._vocab_size, np.bool_)
        return found.found.result()[found.passed][0]

    def rest(self, row: int) -> Sequence[int]:
        """Return the tokens that are forced behind the one chosen under the latest mask."""
        found = self._rows[row]
        if not found.jumps or found.found.exception() is not None:
            return ()
        return found.found.result()[found.passed][1][1:]

    def advance(self, row: int, tokens: Sequence[int]) -> None:
        """Move the row's grammar past `tokens`: a chosen token, or those that were forced behind it."""
        assert self._thread is not None
        found = self._rows[row]
        if list(tokens) == found.drafts[found.passed : found.passed + 1]:  # its mask is known, and the next one, too
            found.passed += 1
            return
        found.found = self._thread.submit(found.advance, tokens, found.passed)
        found.drafts, found.passed = [], 0

    def draft(self, row: int, drafts: Sequence[int], most: int) -> list[int]:
        """Return drafts for `row`, at most `most`, and begin to find the masks behind them.

        What the grammar forces is drafted in place of `drafts`, if it is known in time, and what it surely refuses is
        not drafted. Behind a draft that turns out to be refused there are no masks: it is never chosen.
        """
        assert self._thread is not None
        found = self._rows[row]
        wait((found.found,), _IN_TIME)
        wanted = list(drafts)
        if found.found.done() and found.found.exception() is None:
            banned_V, forced = found.found.result()[found.passed]
            wanted = list(forced[:most]) or wanted
            if wanted and banned_V[wanted[0]]:
                return []
        if wanted:
            found.found = self._thread.submit(found.walk, wanted, found.passed)
            found.drafts, found.passed = wanted, 0
        return wanted

    def end(self, row: int) -> None:
        """Forget `row`, if it is known."""
        self._rows.pop(row, None)

    def close(self) -> None:
        """Join the thread."""
        if self._thread is not None:
            self._thread.shutdown(cancel_futures=True)


class _Row:
    """The grammar state of one row; only the thread touches it, except for the fields without underscores."""

    found: Future[_Found]
    _state: GrammarState

    def __init__(self, vocab_size: int, jumps: bool) -> None:
        self.jumps = jumps
        self.drafts: list[int] = []
        """Latest drafts."""
        self.passed = 0
        """Number of these drafts that were chosen."""
        self._vocab_size = vocab_size
        self._masks: list[bytes] = []
        """Masks at the row's position before the latest drafts, and behind those that the grammar allows."""

    def begin(self, grammar: Grammar, tokens: Sequence[int]) -> _Found:
        self._state = grammar.begin(tokens)
        self._masks = [self._state.allowed()]
        return [self._found()]

    def advance(self, tokens: Sequence[int], passed: int) -> _Found:
        """Go back to the first `passed` of the latest drafts, and on by `tokens`."""
        self._state.rollback(len(self._masks) - 1 - passed)
        for token in tokens:
            self._state.advance(token)
        self._masks = [self._state.allowed()]
        return [self._found()]

    def walk(self, drafts: Sequence[int], passed: int) -> _Found:
        """Go back to the first `passed` of the latest drafts, and on along `drafts` as far as the grammar allows."""
        self._state.rollback(len(self._masks) - 1 - passed)
        self._masks = [self._masks[passed]]
        found = [self._found()]
        for mask in masks_behind(self._state, self._masks[0], drafts):
            self._masks.append(mask)
            found.append(self._found())
        return found

    def _found(self) -> tuple[_Banned, Sequence[int]]:
        """Return the latest mask as an array, and what is forced there."""
        banned_V = np.ones(self._vocab_size, np.bool_)
        bits = np.unpackbits(np.frombuffer(self._masks[-1], np.uint8), bitorder="little")
        known = bits[: self._vocab_size]
        banned_V[: len(known)] = known == 0
        return banned_V, self._state.forced()
