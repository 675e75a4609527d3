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

from headrace.engine.model.shared.late_rows import LateRows
from headrace.engine.scheduling.shaping import Grammar, GrammarState

__all__ = ["CpuMasks"]

_Banned = NDArray[np.bool_]
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
        found = self._rows[row].found
        if found.exception() is not None:  # a failure of this row alone: the step and its other rows go on
            return np.ones(self._vocab_size, np.bool_)
        return found.result()[0]

    def rest(self, row: int) -> Sequence[int]:
        """Return the tokens that are forced behind the one chosen under the latest mask."""
        found = self._rows[row].found
        return () if found.exception() is not None else found.result()[1][1:]

    def advance(self, row: int, tokens: Sequence[int]) -> None:
        """Move the row's grammar past `tokens`: a chosen token, or those that were forced behind it."""
        assert self._thread is not None
        found = self._rows[row]
        found.found = self._thread.submit(found.advance, tokens)

    def end(self, row: int) -> None:
        """Forget `row`, if it is known."""
        self._rows.pop(row, None)

    def close(self) -> None:
        """Join the thread."""
        if self._thread is not None:
            self._thread.shutdown(cancel_futures=True)


class _Row:
    """The grammar state of one row; only the thread touches it, except for `found`."""

    found: Future[tuple[_Banned, Sequence[int]]]
    _state: GrammarState

    def __init__(self, vocab_size: int, jumps: bool) -> None:
        self._vocab_size = vocab_size
        self._jumps = jumps

    def begin(self, grammar: Grammar, tokens: Sequence[int]) -> tuple[_Banned, Sequence[int]]:
        self._state = grammar.begin(tokens)
        return self._find()

    def advance(self, tokens: Sequence[int]) -> tuple[_Banned, Sequence[int]]:
        for token in tokens:
            self._state.advance(token)
        return self._find()

    def _find(self) -> tuple[_Banned, Sequence[int]]:
        banned_V = np.ones(self._vocab_size, np.bool_)
        bits = np.unpackbits(np.frombuffer(self._state.allowed(), np.uint8), bitorder="little")
        known = bits[: self._vocab_size]
        banned_V[: len(known)] = known == 0
        return banned_V, self._state.forced() if self._jumps else ()
