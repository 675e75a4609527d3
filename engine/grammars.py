"""`Grammars`: compiles response formats in threads of their own, bounded in number, size and time; samples nothing.

Parsing and masks are llguidance's, which bounds its own work ("fuel") and answers a grammar that is too much with an
error; docs/sampling.md says how it was chosen.
"""

from __future__ import annotations

import json
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from functools import lru_cache
from typing import TYPE_CHECKING, Final

from headrace.engine.compiled_grammar import CompiledGrammar, ManyRows
from headrace.engine.errors import GrammarRejected, InvalidParams
from headrace.engine.grammar_child import matcher_of
from headrace.engine.grammar_trials import TooSlow, Trials, Vocabulary, may_take_long
from headrace.engine.json_schemas import JSON_STYLE, exact_grammar, exact_schema
from headrace.engine.opened import Opened
from headrace.engine.params import shown
from headrace.engine.response_format import ResponseFormat
from headrace.engine.threads import Poster, Worker

if TYPE_CHECKING:
    from llguidance import LLTokenizer

__all__ = ["Grammars"]

_THREADS: Final = 2
_QUEUED: Final = 1024
_SECONDS: Final = 5.0
_KEPT: Final = 64
_TEXTS: Final = 512  # between choices, which rows of one format share
_MESSAGE: Final = 300  # characters of what llguidance says, which may quote the whole source

# Tokens that may stand in a string, by length: those that cannot exceed what is left of it are allowed without being
# looked at one by one. llguidance has 10 and 30; without shorter ones the last characters of a string cost most of all.
_STRING_LENGTHS: Final = (2, 4, 6, 8)
_IN_STRING: Final = r'[^"\\\x00-\x1F\x7F]{1,%d}'

Done = Callable[["CompiledGrammar | None", BaseException | None], None]
_Waiting = tuple[Callable[[], bool], Done]


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
        self._vocabulary: Vocabulary = ((), (), ())
        self._trials = Trials()
        self._many = ManyRows()

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
        self._trials.close()

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
        tokens = self._tokens(opened)
        try:
            source = _source(wanted)
            if may_take_long(wanted) and not self._trials.run(source, lambda: self._vocabulary, still_wanted):
                return None
            matcher = matcher_of(tokens, source)
        except TooSlow as error:
            raise _rejected(str(error), wanted, error.seconds) from None
        except (ValueError, RecursionError, OSError) as error:
            raise _rejected(str(error), wanted) from None
        return CompiledGrammar(lambda: matcher_of(tokens, source), matcher, self._many)

    def _tokens(self, opened: Opened) -> LLTokenizer:
        with self._tokens_lock:
            if self._ll_tokenizer is None:
                from llguidance import LLTokenizer, TokenizerWrapper

                vocabulary = _Vocabulary(opened)
                self._vocabulary = vocabulary.tokens, vocabulary.special_token_ids, _end_ids(opened)
                slices = [*LLTokenizer.general_slices(), *(_IN_STRING % length for length in _STRING_LENGTHS)]
                wrapped = TokenizerWrapper(vocabulary)
                self._ll_tokenizer = LLTokenizer(wrapped, eos_token=_end_ids(opened), slices=slices)
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
        self._known = lru_cache(_TEXTS)(self._cut)

    def __call__(self, text: bytes) -> list[int]:
        """Tokens of a text that a grammar leaves no choice about, as the tokenizer would cut it within a longer one."""
        return self._known(bytes(text))

    def _cut(self, text: bytes) -> list[int]:
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
        return LLMatcher.grammar_from_json_schema(json.dumps(exact_schema(schema)), overrides=JSON_STYLE)
    if wanted.kind == "lark":
        return LLMatcher.grammar_from_lark(exact_grammar(wanted.source))
    return LLMatcher.grammar_from_regex(wanted.source)


def _end_ids(opened: Opened) -> list[int]:
    """End-of-sequence ids that the model can say."""
    return [token for token in opened.tokenizer.eos_ids if token < opened.info.vocab_size]


def _rejected(what: str, wanted: ResponseFormat, limit: object = None) -> GrammarRejected:
    message = f"response_format: {what[:_MESSAGE]}, got {shown(wanted.source)}"
    return GrammarRejected(message, field="response_format", value=wanted, limit=limit)
