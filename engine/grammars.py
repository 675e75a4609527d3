"""`Grammars`: compiles response formats in threads of their own, bounded in number, size and time; samples nothing.

Parsing and masks are llguidance's, which bounds its own work ("fuel") and answers a grammar that is too much with an
error; docs/sampling.md says how it was chosen.
"""

from __future__ import annotations

import json
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Final
from weakref import WeakSet

from headrace.engine.errors import GrammarRejected, InvalidParams
from headrace.engine.opened import Opened
from headrace.engine.params import shown
from headrace.engine.response_format import ResponseFormat
from headrace.engine.scheduling.shaping import GrammarState
from headrace.engine.threads import Poster, Worker

if TYPE_CHECKING:
    from llguidance import LLExecutor, LLMatcher, LLTokenizer

__all__ = ["CompiledGrammar", "Grammars"]

_THREADS: Final = 2
_LEXERS: Final = 8  # of one format
_ROWS_OF_LEXER: Final = 24  # which take turns with their masks
_QUEUED: Final = 1024
_SECONDS: Final = 5.0
_KEPT: Final = 64
_STATES: Final = 50_000  # of some 60 bytes each, in a lexer that rows of one format share
_MESSAGE: Final = 300  # characters of what llguidance says, which may quote the whole source
# Compact, as models write JSON on one line: free white space would let a model go on with nothing else.
# Without \u a text has one spelling, so that no property gets past its own schema under an escaped name.
_JSON: Final[Any] = {
    "whitespace_flexible": False,
    "item_separator": ", ",
    "key_separator": ": ",
    "json_allowed_escapes": 'nrbtf\\"',
}

Done = Callable[["CompiledGrammar | None", BaseException | None], None]
_Waiting = tuple[Callable[[], bool], Done]


class CompiledGrammar:
    """A grammar that any number of rows may begin, in any thread."""

    def __init__(self, fresh: Callable[[], LLMatcher], matcher: LLMatcher, many: Callable[[], _Many]) -> None:
        """Keep `matcher`, which has consumed nothing, to be copied; `fresh` makes another one.

        Args:
            fresh: Compiles the grammar again.
            matcher: What it gave.
            many: What finds the masks of many rows at once, made when first asked for.
        """
        self._fresh = fresh
        self._many = many
        self._lexers = [_Lexer(matcher)]
        self._lock = threading.Lock()

    def begin(self, tokens: Sequence[int]) -> _Matcher:
        """The state after `tokens`."""
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
        """Let many rows go on and write their masks, beside the interpreter."""
        self._many().fill([(state, tokens, row) for state, tokens, row in states if isinstance(state, _Matcher)], masks)

    def alone(self, lexer: _Lexer) -> LLMatcher:
        """A matcher for the one row that found no room left for states in the lexer that it shares."""
        lexer.spent = True
        return self._fresh()


class _Lexer:
    """A matcher that consumes nothing, whose copies share their lexer's states; they lock it while they find a mask."""

    def __init__(self, matcher: LLMatcher) -> None:
        self.matcher = matcher
        self.spent = False
        self.rows: WeakSet[_Matcher] = WeakSet()


class _Matcher:
    """Where one row stands in its grammar."""

    def __init__(self, grammar: CompiledGrammar, lexer: _Lexer) -> None:
        self._grammar: CompiledGrammar | None = grammar
        self.lexer = lexer
        self.matcher = lexer.matcher.deep_copy()
        self._tokens: list[int] = []
        lexer.rows.add(self)
        self.known: list[int] | None = None
        """What is forced; None until that has been found."""

    @property
    def shared(self) -> object:
        return self.lexer

    def begin(self, tokens: Sequence[int]) -> None:
        """Go on from the start, all at once."""
        self._tokens = list(tokens)
        self.matcher.consume_tokens(self._tokens)

    def advance(self, token: int) -> None:
        self.note(token)
        self.matcher.consume_token(token)

    def note(self, token: int) -> None:
        """Keep what follows from a token for all but the matcher."""
        self._tokens.append(token)
        self.known = self.known[1:] or None if self.known and self.known[0] == token else None

    def forced(self) -> Sequence[int]:
        if self.known is None:
            self.known = [] if self.matcher.is_error() else self.matcher.compute_ff_tokens()
        return self.known

    def allowed(self) -> bytes:
        if forced := self.forced():
            return _only(forced[0])
        mask = self.matcher.compute_bitmask()
        if not self.matcher.is_error():  # asked now: finding the mask may be what fails
            return mask
        if self._grammar is None:
            return b""
        self.matcher, self._grammar, self.known = self._grammar.alone(self.lexer), None, None
        self.matcher.consume_tokens(self._tokens)
        return self.allowed()


class _Many:
    """What an engine does for the rows of many states at once, in threads that need no interpreter meanwhile."""

    def __init__(self, tokens: Sequence[bytes]) -> None:
        """Prepare; `tokens` are those of the vocabulary."""
        import numpy as np  # beside the first device that keeps masks, and not with this module

        self._here = threading.local()
        """`executor` of a thread: it calls for many rows at once, which take their turns."""
        of_byte = {piece: token for token, piece in enumerate(tokens) if len(piece) == 1}
        ids = np.array(list(of_byte.values()), np.int64)
        self._words, inverse = np.unique(ids // 32, return_inverse=True)
        """Of a mask: those that hold bits of tokens of one byte, no byte twice."""
        self._bits = np.zeros(len(self._words), np.uint32)
        np.bitwise_or.at(self._bits, inverse, np.left_shift(np.uint32(1), (ids % 32).astype(np.uint32)))

    def fill(self, asked: Sequence[tuple[_Matcher, Sequence[int], int]], masks: memoryview) -> None:
        """Go on and find masks: all at once where several bytes may follow, which mostly tells that nothing is forced.

        What fails is seen in the masks.
        """
        import numpy as np

        words_RW, executor, states = np.asarray(masks).view(np.uint32), self._executor(), []
        for state, tokens, row in asked:
            for token in tokens:
                state.note(token)
            if len(tokens) > 1:
                state.matcher.consume_tokens(list(tokens))
            states.append((state, row))
        if ones := [(state.matcher, tokens[0]) for state, tokens, _ in asked if len(tokens) == 1]:
            executor.consume_token_par(ones)
        unknown = [each for each in states if not each[0].known]
        if unknown:
            pointer, line = words_RW.ctypes.data, words_RW.strides[0]
            executor.unsafe_compute_mask_ptr(
                [(state.matcher, row) for state, row in unknown], pointer, line, len(words_RW)
            )
            found = words_RW[np.array([row for _, row in unknown])[:, None], self._words] & self._bits
            for (state, row), several in zip(unknown, (np.bitwise_count(found).sum(1) > 1).tolist(), strict=True):
                if state.matcher.is_error():
                    words_RW[row] = np.frombuffer(state.allowed() or bytes(line), words_RW.dtype)
                elif several:
                    state.known = []
        forced = [(row, tokens[0]) for state, row in states if (tokens := state.forced())]
        if forced:
            rows, ids = np.array(forced).T
            words_RW[rows] = 0
            words_RW[rows, ids // 32] = np.left_shift(np.uint32(1), (ids % 32).astype(np.uint32))

    def _executor(self) -> LLExecutor:
        if not hasattr(self._here, "executor"):
            from llguidance import LLExecutor

            self._here.executor = LLExecutor(1)
        executor: LLExecutor = self._here.executor
        return executor


def _only(token: int) -> bytes:
    """The mask of one token; what is missing at its end is not allowed."""
    mask = bytearray(4 * (token // 32 + 1))
    mask[token // 8] = 1 << token % 8
    return bytes(mask)


class Grammars:
    """The compiler of one engine: `_THREADS` threads, started when first needed, and the grammars last used."""

    def __init__(self, post: Poster, make_worker: Callable[..., Worker] = Worker) -> None:
        """Compile nothing yet; `post` brings results to the event loop, `make_worker` makes the threads."""
        self._post = post
        self._make_worker = make_worker
        self._worker: Worker | None = None
        self._queued = 0
        self._closed = False
        self._lock = threading.Lock()
        self._in_flight: dict[ResponseFormat, list[_Waiting]] = {}
        """Who waits for what is queued or being compiled; under the lock."""
        self._kept: OrderedDict[ResponseFormat, CompiledGrammar] = OrderedDict()
        self._tokens_lock = threading.Lock()
        self._ll_tokenizer: LLTokenizer | None = None
        self._pieces: Sequence[bytes] = ()
        self._many: _Many | None = None

    def compile(self, wanted: ResponseFormat, opened: Opened, still_wanted: Callable[[], bool], done: Done) -> None:
        """Compile `wanted` and call `done`, here or later on the event loop, with the grammar or a typed error.

        Args:
            wanted: The format.
            opened: The model whose tokens are to keep to it, always the same one.
            still_wanted: Asked in a thread when its turn comes; if not, nothing is compiled.
            done: Gets a `CompiledGrammar`, or neither it nor an error where it is no longer wanted; `GrammarRejected`
                where the format is invalid or too large, takes longer than five seconds, or too many others wait;
                `InvalidParams` where the model has no token to end with.
        """
        grammar = self._kept.get(wanted)
        if grammar is not None:
            self._kept.move_to_end(wanted)
            done(grammar, None)
            return
        if not _end_ids(opened):
            done(None, InvalidParams("response_format: this model has no token to end with", field="response_format"))
            return
        if self._queued >= _QUEUED:
            done(None, _rejected(f"{_QUEUED} others wait to be compiled", wanted, _QUEUED))
            return
        self._queued += 1
        with self._lock:
            waiting = self._in_flight.setdefault(wanted, [])
            waiting.append((still_wanted, done))
            if len(waiting) > 1:
                return
        self._submit(wanted, opened, waiting)

    def close(self) -> None:
        """Drop what waits and join the threads."""
        self._closed = True
        if self._worker is not None:
            self._worker.close()

    def _submit(self, wanted: ResponseFormat, opened: Opened, waiting: list[_Waiting]) -> None:
        deadline = time.monotonic() + _SECONDS

        def compiled(grammar: CompiledGrammar | None, error: BaseException | None) -> None:
            with self._lock:
                if self._in_flight.get(wanted) is waiting:
                    del self._in_flight[wanted]
            self._queued -= len(waiting)
            if grammar is not None:
                self._kept[wanted] = grammar
                if len(self._kept) > _KEPT:
                    self._kept.popitem(last=False)
            for _, done in waiting:
                done(grammar, error)

        if self._worker is None:
            self._worker = self._make_worker("headrace-grammar", self._post, threads=_THREADS)
        self._worker.submit(lambda: self._compile(wanted, opened, lambda: self._claim(wanted), deadline), compiled)

    # -- in the worker's threads ---------------------------------------------------------------------------------------

    def _claim(self, wanted: ResponseFormat) -> bool:
        """Whether anybody still wants this; if not, whoever asks from now on begins anew."""
        with self._lock:
            if not self._closed and any(still_wanted() for still_wanted, _ in self._in_flight[wanted]):
                return True
            del self._in_flight[wanted]
            return False

    def _compile(
        self, wanted: ResponseFormat, opened: Opened, still_wanted: Callable[[], bool], deadline: float
    ) -> CompiledGrammar | None:
        if not still_wanted():
            return None
        if time.monotonic() > deadline:
            raise _rejected(f"it waited {_SECONDS:g} s for others to be compiled", wanted, _SECONDS)
        from llguidance import LLMatcher, LLParserLimits

        limits = LLParserLimits(max_lexer_states=_STATES, verbose_errors=False)
        tokens = self._tokens(opened)
        try:
            source = _source(wanted)
            matcher = LLMatcher(tokens, source, log_level=0, limits=limits)
        except (ValueError, RecursionError) as error:
            raise _rejected(str(error), wanted) from None
        matcher.compute_bitmask()  # some grammars are found to be too large only now, or where there is a choice
        if forced := matcher.compute_ff_tokens():
            matcher.consume_tokens(forced)
            matcher.compute_bitmask()
        if matcher.is_error():
            raise _rejected(matcher.get_error().partition("\n")[0], wanted)
        if time.monotonic() > deadline:
            raise _rejected(f"it takes longer than {_SECONDS:g} s to compile", wanted, _SECONDS)
        matcher.reset()
        return CompiledGrammar(lambda: LLMatcher(tokens, source, log_level=0, limits=limits), matcher, self._many_rows)

    def _many_rows(self) -> _Many:
        """In any of the threads that find masks."""
        with self._tokens_lock:
            if self._many is None:
                self._many = _Many(self._pieces)
            return self._many

    def _tokens(self, opened: Opened) -> LLTokenizer:
        with self._tokens_lock:
            if self._ll_tokenizer is None:
                from llguidance import LLTokenizer, TokenizerWrapper

                vocabulary = _Vocabulary(opened)
                self._pieces = vocabulary.tokens
                self._ll_tokenizer = LLTokenizer(TokenizerWrapper(vocabulary), eos_token=_end_ids(opened))
            return self._ll_tokenizer


class _Vocabulary:
    """A token table as llguidance reads one; ids without a token are special, which no grammar can ask for."""

    bos_token_id = None

    def __init__(self, opened: Opened) -> None:
        tokenizer, vocab_size = opened.tokenizer, opened.info.vocab_size
        pieces = tokenizer.table.pieces[:vocab_size]
        pieces = [*pieces, *[b""] * (vocab_size - len(pieces))]
        self.eos_token_id = _end_ids(opened)[0]
        special = tokenizer.table.special_ids.union(tokenizer.eos_ids)
        self.special_token_ids = [token for token, piece in enumerate(pieces) if not piece or token in special]
        self._special = frozenset(self.special_token_ids)
        self.tokens = [piece or b"<none %d>" % token for token, piece in enumerate(pieces)]
        self._tokenizer = tokenizer
        self._ids = {piece: token for token, piece in enumerate(pieces) if piece and token not in special}
        self._longest = max(map(len, self._ids))

    def __call__(self, text: bytes) -> list[int]:
        """Tokens of a text that a grammar leaves no choice about, as the tokenizer would cut it within a longer one."""
        try:
            ids = self._tokenizer.encode(text.decode())
            frame = set(self._tokenizer.encode(""))
        except (UnicodeDecodeError, InvalidParams):
            return self._longest_first(text)
        ids = [token for token in ids if token not in frame]
        same = b"".join(self.tokens[token] for token in ids if token < len(self.tokens)) == text
        if not same or self._special.intersection(ids):  # many put a space before a text; it may spell a control token
            return self._longest_first(text)
        return ids

    def _longest_first(self, text: bytes) -> list[int]:
        ids = []
        start = 0
        while start < len(text):
            ends = range(min(start + self._longest, len(text)), start, -1)
            end = next((end for end in ends if text[start:end] in self._ids), None)
            if end is None:  # a byte that the vocabulary cannot say
                break
            ids.append(self._ids[text[start:end]])
            start = end
        return ids


def _source(wanted: ResponseFormat) -> str:
    """The grammar as llguidance reads it.

    Raises:
        ValueError: It is none.
    """
    from llguidance import LLMatcher

    if wanted.kind in ("json_schema", "json_object"):
        schema = json.loads(wanted.source)
        if isinstance(schema, dict) and "x-guidance" in schema:  # llguidance reads it here alone
            raise ValueError("x-guidance, which would change how the schema is kept, is not supported")
        return LLMatcher.grammar_from_json_schema(wanted.source, overrides=_JSON)
    if wanted.kind == "lark":
        return LLMatcher.grammar_from_lark(wanted.source)
    return LLMatcher.grammar_from_regex(wanted.source)


def _end_ids(opened: Opened) -> list[int]:
    """End-of-sequence ids that the model can say."""
    return [token for token in opened.tokenizer.eos_ids if token < opened.info.vocab_size]


def _rejected(what: str, wanted: ResponseFormat, limit: object = None) -> GrammarRejected:
    message = f"response_format: {what[:_MESSAGE]}, got {shown(wanted.source)}"
    return GrammarRejected(message, field="response_format", value=wanted, limit=limit)
