"""`Grammars`: compiles response formats in threads of their own, in turns by tenant and in bounded time.

llguidance does the parsing and finds the masks; it bounds its own work ("fuel") and answers an excessive grammar with
an error. docs/sampling.md says how it was chosen.
"""

from __future__ import annotations

import copy
import json
import math
import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Callable
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Final, NamedTuple

from headrace.engine.concurrency.fair_worker import FairWorker
from headrace.engine.concurrency.threads import Poster
from headrace.engine.errors import GrammarRejected, HeadraceError, InvalidParams, Overloaded, Rejected
from headrace.engine.grammar.child import matcher_of
from headrace.engine.grammar.compiled import CompiledGrammar, ManyRows
from headrace.engine.grammar.jobs import Claim, Done, GrammarJob, GrammarJobs, Waiter
from headrace.engine.grammar.json_schemas import JSON_STYLE, exact_grammar, exact_schema
from headrace.engine.grammar.trials import Starved, TooSlow, Trials, Unfit, Vocabulary, may_take_long
from headrace.engine.intake.prompts import TOKENS_A_SECOND, Charge, charge_nobody
from headrace.engine.life.opened import Opened
from headrace.engine.params import shown
from headrace.engine.response_format import ResponseFormat

if TYPE_CHECKING:
    from llguidance import LLTokenizer

__all__ = ["Grammars"]

_THREADS: Final = 2
_TRIALS: Final = 2  # trials at a time, each for another tenant
_WAITING: Final = 1024  # waiting requests of one tenant
_PATIENCE: Final = 5.0  # seconds for which a format may wait for its tenant's turn
_KEPT: Final = 64
_TEXTS: Final = 512  # forced texts whose tokens are kept
_MESSAGE: Final = 300  # characters of llguidance's message, which may quote the whole source

# Tokens that may stand in a string, by length: a token that cannot exceed the rest of a string is allowed without a
# look at it. llguidance has 10 and 30; without shorter ones the last characters of a string cost the most.
_STRING_LENGTHS: Final = (2, 4, 6, 8)
_IN_STRING: Final = r'[^"\\\x00-\x1F\x7F]{1,%d}'


class _Told(NamedTuple):
    """The result of a turn for the requests that wait."""

    claim: Claim
    job: GrammarJob | None = None
    """The job that the turn has ended; None if it goes on, or had begun before."""
    grammar: CompiledGrammar | None = None
    error: Rejected | None = None
    work: int = 0
    """Tokens charged for a trial, whatever its result."""


class Grammars:
    """The compiler of one engine: its threads, which start when they are first needed, and the grammars last used.

    Formats that need a trial have threads of their own, so that no other format waits for one.
    """

    def __init__(self, post: Poster, make_worker: Callable[..., FairWorker] = FairWorker) -> None:
        """Compile nothing yet; `post` brings results to the event loop, `make_worker` makes the threads."""
        self._post = post
        self._make_worker = make_worker
        self._compiling: FairWorker | None = None
        self._trying: FairWorker | None = None
        self._trying_lock = threading.Lock()
        self._waiting: Counter[str | None] = Counter()
        """Number of waiting requests by tenant."""
        self._jobs = GrammarJobs(_PATIENCE)
        self._kept: OrderedDict[ResponseFormat, CompiledGrammar] = OrderedDict()
        self._tokens_lock = threading.Lock()
        self._ll_tokenizer: LLTokenizer | None = None
        self._vocabulary: Vocabulary = ((), (), ())
        self._trials = Trials()
        self._many = ManyRows()

    def compile(
        self,
        wanted: ResponseFormat,
        opened: Opened,
        still_wanted: Callable[[], bool],
        done: Done,
        *,
        tenant: str | None = None,
        charge: Charge = charge_nobody,
    ) -> None:
        """Compile `wanted` and call `done` on the event loop, at once or later, with the grammar or a typed error.

        Args:
            wanted: The response format.
            opened: The model whose tokens must follow the format; the same in every call.
            still_wanted: Asked in a thread when the turn comes; if it returns False, nothing is compiled.
            done: Gets a `CompiledGrammar`, or neither a grammar nor an error if it is no longer wanted;
                `GrammarRejected` if the format is invalid, too large or takes longer to compile than it may;
                `Overloaded` if it waits too long for others, or too many requests of its tenant wait; `InvalidParams`
                if the model has no token to end with.
            tenant: The tenant whose turn is taken.
            charge: Function that is told of a trial in a turn of that tenant, unless another of its requests is told.
        """
        grammar = self._kept.get(wanted)
        if grammar is not None:
            self._kept.move_to_end(wanted)
            done(grammar, None)
            return
        if not _end_ids(opened):
            done(None, InvalidParams("response_format: this model has no token to end with", field="response_format"))
            return
        if self._waiting[tenant] >= _WAITING:
            done(None, _refused(Overloaded, f"{_WAITING} others wait to be compiled", wanted, _WAITING))
            return
        self._waiting[tenant] += 1
        job = self._jobs.join(wanted, opened, Waiter(tenant, time.monotonic(), still_wanted, done, charge))
        if job is not None:
            if self._compiling is None:
                self._compiling = self._make_worker("headrace-grammar", self._post, threads=_THREADS)
            turn = partial(self._look, job, tenant)
            self._compiling.submit_for(tenant, turn, partial(self._tell, job, tenant), cost=len(wanted.source))

    def drop(self, error: BaseException) -> None:
        """End waiting requests with `error`, and running compilations as soon as possible. Called on the event loop."""
        self._jobs.close()
        for worker in (self._compiling, self._trying):
            if worker is not None:
                worker.drop(error)

    def close(self) -> None:
        """Begin nothing more and join the threads."""
        self._jobs.close()
        if self._compiling is not None:
            self._compiling.close()
        if self._trying is not None:  # closed last, since the other threads start it
            self._trying.close()
        self._trials.close()

    def _tell(self, job: GrammarJob, tenant: str | None, told: _Told | None, error: BaseException | None) -> None:
        """Tell the requests that wait for `job` the result of a turn of `tenant`."""
        if error is not None:  # a defect, not a refusal
            for waiter in self._jobs.end(job):
                self._answer(waiter, None, error)
            return
        if told is None:  # the job goes on in a trial
            return
        for waiter in told.claim.gone:
            self._answer(waiter, None, None)
        for waiter in told.claim.late:
            what = f"it waited {_PATIENCE:g} s for others to be compiled"
            self._answer(waiter, None, _refused(Overloaded, what, job.wanted, _PATIENCE))
        if told.job is None:
            return
        if told.grammar is not None:
            self._kept[job.wanted] = told.grammar
            if len(self._kept) > _KEPT:
                self._kept.popitem(last=False)
        waiters = sorted(self._jobs.end(job), key=lambda waiter: waiter.tenant != tenant)
        if told.work and waiters:  # one request pays, of the turn's tenant if it has one
            waiters[0].charge(told.work)
        for waiter in waiters:
            self._answer(waiter, told.grammar, copy.copy(told.error))

    def _answer(self, waiter: Waiter, grammar: CompiledGrammar | None, error: BaseException | None) -> None:
        self._waiting[waiter.tenant] -= 1
        if not self._waiting[waiter.tenant]:
            del self._waiting[waiter.tenant]
        waiter.done(grammar, error)

    # -- in the workers' threads ---------------------------------------------------------------------------------------

    def _look(self, job: GrammarJob, tenant: str | None) -> _Told | None:
        """Compile a format in a turn of `tenant`, or queue a turn of that tenant for its trial."""
        if job.begun or not may_take_long(job.wanted):
            return self._work(job, tenant, lambda job: (self._compile(job), 0.0))
        with self._trying_lock:
            if self._trying is None:
                self._trying = self._make_worker("headrace-trial", self._post, threads=_TRIALS, most_of_one=1)
        turn = partial(self._work, job, tenant, self._try)
        self._trying.submit_for(tenant, turn, partial(self._tell, job, tenant))
        return None

    def _work(
        self, job: GrammarJob, tenant: str | None, make: Callable[[GrammarJob], tuple[CompiledGrammar | None, float]]
    ) -> _Told:
        """Compile a job in a turn of `tenant`, unless it has begun or the tenant can no longer use it."""
        claim = self._jobs.claim(job, tenant, time.monotonic())
        if not claim.begins:
            return _Told(claim)
        wanted = job.wanted
        try:
            grammar, seconds = make(job)
            return _Told(claim, job, grammar, work=_tokens(seconds))
        except Unfit as error:
            limit = error.seconds if isinstance(error, TooSlow) else None
            refusal = _refused(GrammarRejected, str(error), wanted, limit)
            return _Told(claim, job, error=refusal, work=_tokens(error.seconds))
        except Starved:
            what = "the machine is too busy to try whether it can be compiled"
            return _Told(claim, job, error=_refused(Overloaded, what, wanted))
        except (ValueError, RecursionError, OSError) as error:
            return _Told(claim, job, error=_refused(GrammarRejected, str(error), wanted))

    def _compile(self, job: GrammarJob) -> CompiledGrammar:
        source, tokens = _source(job.wanted), self._tokens(job.opened)
        return CompiledGrammar(lambda: matcher_of(tokens, source), matcher_of(tokens, source), self._many)

    def _try(self, job: GrammarJob) -> tuple[CompiledGrammar | None, float]:
        """Compile a format, once a trial in another process has succeeded.

        Returns:
            The grammar, or None if nobody wants it any more, and the seconds that its trial took.
        """
        source = _source(job.wanted)
        self._tokens(job.opened)  # reads the vocabulary
        tried = self._trials.run(source, lambda: self._vocabulary, lambda: self._jobs.still_wanted(job))
        return self._compile(job) if tried.wanted else None, tried.seconds

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
    """The token table in the form that llguidance reads; ids without a token are special, so grammars cannot name
    them."""

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
        """Return the tokens of a forced text, as the tokenizer would cut it within a longer text."""
        return self._known(bytes(text))

    def _cut(self, text: bytes) -> list[int]:
        try:
            ids = self._tokenizer.encode(text.decode())
            frame = set(self._tokenizer.encode(""))
        except (UnicodeDecodeError, HeadraceError):
            return self._longest_first(text)
        ids = [token for token in ids if token not in frame]
        same = b"".join(self.tokens[token] for token in ids if token < len(self.tokens)) == text
        if not same or self._special.intersection(ids):  # such as a space put before it, or a control token
            return self._longest_first(text)
        return ids

    def _longest_first(self, text: bytes) -> list[int]:
        ids = []
        start = 0
        while start < len(text):
            ends = range(min(start + self._longest, len(text)), start, -1)
            end = next((end for end in ends if text[start:end] in self._ids), None)
            if end is None:  # a byte that the vocabulary lacks
                break
            ids.append(self._ids[text[start:end]])
            start = end
        return ids


def _source(wanted: ResponseFormat) -> str:
    """Return the grammar in the form that llguidance reads.

    Raises:
        ValueError: The format is not valid.
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


def _tokens(seconds: float) -> int:
    """Return the tokens that a trial of `seconds` is charged as."""
    return max(1, math.ceil(seconds * TOKENS_A_SECOND))  # clocks may be coarse


def _end_ids(opened: Opened) -> list[int]:
    """Return the end-of-sequence ids that the model can generate."""
    return [token for token in opened.tokenizer.eos_ids if token < opened.info.vocab_size]


def _refused(kind: type[Rejected], what: str, wanted: ResponseFormat, limit: object = None) -> Rejected:
    message = f"response_format: {what[:_MESSAGE]}, got {shown(wanted.source)}"
    return kind(message, field="response_format", value=wanted, limit=limit)
