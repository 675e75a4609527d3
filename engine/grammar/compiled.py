"""`CompiledGrammar`: the states of rows in a response format, and masks of the next tokens, for one row or many.

Owns the lexers that rows of one format share; starts no thread and compiles nothing by itself. llguidance does the
parsing and finds the masks. Next to read: compiler.py, which makes these.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Final
from weakref import WeakSet

from headrace.engine.scheduling.shaping import GrammarState

if TYPE_CHECKING:
    from llguidance import LLExecutor, LLMatcher

__all__ = ["CompiledGrammar", "ManyRows"]

_LEXERS: Final = 16  # for one format
_ROWS_OF_LEXER: Final = 16  # rows that share a lexer take turns to find masks
_THREADS: Final = 12


class CompiledGrammar:
    """A grammar that any number of rows may begin, in any thread."""

    def __init__(self, fresh: Callable[[], LLMatcher], matcher: LLMatcher, many: ManyRows) -> None:
        """Keep `matcher`, which has consumed nothing and is copied for rows; `fresh` makes another one.

        Args:
            fresh: Compiles the grammar again.
            matcher: The compiled grammar.
            many: Finds the masks of many rows at once.
        """
        self._fresh = fresh
        self._many = many
        self._lexers = [_Lexer(matcher)]
        self._lock = threading.Lock()

    def begin(self, tokens: Sequence[int]) -> _Matcher:
        """Return the state after `tokens`."""
        with self._lock:
            lexers = self._lexers = [lexer for lexer in self._lexers if not lexer.spent]
            lexer = min(lexers, key=lambda each: len(each.rows), default=None)
            if lexer is None or (len(lexer.rows) >= _ROWS_OF_LEXER and len(lexers) < _LEXERS):
                lexer = _Lexer(self._fresh())
                lexers.append(lexer)
            state = _Matcher(self, lexer)
        state.begin(tokens)
        return state

    def fill(self, states: Sequence[tuple[GrammarState, Sequence[int], int]], masks: memoryview) -> None:
        """Advance many rows and write their masks, without holding the interpreter."""
        self._many.fill([(state, tokens, row) for state, tokens, row in states if isinstance(state, _Matcher)], masks)

    def alone(self, lexer: _Lexer) -> LLMatcher:
        """Return a matcher for one row alone, since its shared lexer has no room left for states."""
        lexer.spent = True
        return self._fresh()


class _Lexer:
    """A matcher that consumes nothing. Its copies share the lexer's states and lock it while they find a mask."""

    def __init__(self, matcher: LLMatcher) -> None:
        self.matcher = matcher
        self.spent = False
        self.rows: WeakSet[_Matcher] = WeakSet()


class _Matcher:
    """The state of one row in its grammar."""

    def __init__(self, grammar: CompiledGrammar, lexer: _Lexer) -> None:
        self._grammar: CompiledGrammar | None = grammar
        self.lexer = lexer
        self.matcher = lexer.matcher.deep_copy()
        self._tokens: list[int] = []
        self._earlier: list[list[int] | None] = []
        """Values of `known` before each of the last tokens."""
        lexer.rows.add(self)
        self.known: list[int] | None = None
        """Token ids that are forced next; None until they have been found."""

    def begin(self, tokens: Sequence[int]) -> None:
        """Consume all tokens from the start at once."""
        self._tokens = list(tokens)
        self.matcher.consume_tokens(self._tokens)

    def advance(self, token: int) -> None:
        self.note(token)
        self.matcher.consume_token(token)

    def note(self, token: int) -> None:
        """Update everything but the matcher for a token."""
        self._tokens.append(token)
        self._earlier.append(self.known)
        self.known = self.known[1:] or None if self.known and self.known[0] == token else None

    def rollback(self, count: int) -> None:
        if not count:
            return
        self.known = self._earlier[-count]
        del self._tokens[-count:], self._earlier[-count:]
        # Behind the end of the text, llguidance would go back one token too far.
        if self.matcher.is_error() or self.matcher.is_stopped() or not self.matcher.rollback(count):
            self.matcher = self.lexer.matcher.deep_copy()
            self.matcher.consume_tokens(self._tokens)

    def forced(self) -> Sequence[int]:
        if self.known is None:
            self.known = [] if self.matcher.is_error() else self.matcher.compute_ff_tokens()
        return self.known

    def allowed(self) -> bytes:
        if forced := self.forced():
            return _only(forced[0])
        mask = self.matcher.compute_bitmask()
        if not self.matcher.is_error():  # checked here, since finding the mask may fail
            return mask
        if self._grammar is None:
            return b""
        self.matcher, self._grammar, self.known = self._grammar.alone(self.lexer), None, None
        self.matcher.consume_tokens(self._tokens)
        return self.allowed()


class ManyRows:
    """Advances and masks the rows of many states at once, in threads that need no interpreter meanwhile."""

    def __init__(self) -> None:
        """Start no thread."""
        self._lock = threading.Lock()
        self._executor: LLExecutor | None = None

    def fill(self, asked: Sequence[tuple[_Matcher, Sequence[int], int]], masks: memoryview) -> None:
        """Advance the states and write their masks; a state's failure shows when its mask is found.

        Forced tokens come first: Python cuts forced text into tokens, which a mask would otherwise ask of it for each
        row, from threads that would have to wait for the interpreter.
        """
        import numpy as np  # imported with the first masks, not with this module

        words_RW, executor = np.asarray(masks).view(np.uint32), self._threads()
        asked = sorted(asked, key=lambda each: id(each[0].lexer))  # rows of one lexer become neighbours
        for state, tokens, _ in asked:
            for token in tokens:
                state.note(token)
            if len(tokens) > 1:
                state.matcher.consume_tokens(list(tokens))
        if ones := [(state.matcher, tokens[0]) for state, tokens, _ in asked if len(tokens) == 1]:
            executor.consume_token_par(ones)
        if forced := [(row, tokens[0]) for state, _, row in asked if (tokens := state.forced())]:
            rows, ids = np.array(forced).T
            words_RW[rows] = 0
            words_RW[rows, ids // 32] = np.left_shift(np.uint32(1), (ids % 32).astype(np.uint32))
        unknown = [(state, row) for state, _, row in asked if not state.known]
        if unknown:
            pointer, line = words_RW.ctypes.data, words_RW.strides[0]
            executor.unsafe_compute_mask_ptr(
                [(state.matcher, row) for state, row in unknown], pointer, line, len(words_RW)
            )
            for state, row in unknown:
                if state.matcher.is_error():
                    words_RW[row] = np.frombuffer(state.allowed() or bytes(line), words_RW.dtype)

    def _threads(self) -> LLExecutor:
        with self._lock:
            if self._executor is None:
                from llguidance import LLExecutor

                others = 2  # threads: the event loop's, and one that launches steps
                self._executor = LLExecutor(max(1, min(_THREADS, (os.cpu_count() or 1) - others)))
            return self._executor


def _only(token: int) -> bytes:
    """Return the mask of one token; missing bytes at its end count as not allowed."""
    mask = bytearray(4 * (token // 32 + 1))
    mask[token // 8] = 1 << token % 8
    return bytes(mask)
