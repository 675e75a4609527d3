"""Compiles grammars for `Trials` in a process of its own, which may be ended at any time; keeps none of them.

Run as a script, which imports nothing of headrace. The first line of JSON on standard input is the vocabulary; each
further one is a grammar and the seconds of processor time that it may take. The answer to each is a line: what is wrong
with it, or an empty text, and the seconds that it took. Where a grammar takes longer, the system ends the process with
SIGPROF. The engine uses `matcher_of`, too.
"""

from __future__ import annotations

import json
import signal
import sys
import time
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

__all__ = ["matcher_of"]

_STATES: Final = 50_000  # of some 60 bytes each, in a lexer that rows of one format share
_BYTES: Final = 4 << 30  # of address space


def matcher_of(tokens: LLTokenizer, source: str) -> LLMatcher:
    """A matcher that has consumed nothing, of a grammar as llguidance reads it, and whose first masks can be found.

    Raises:
        ValueError: There can be none.
    """
    from llguidance import LLMatcher, LLParserLimits

    limits = LLParserLimits(max_lexer_states=_STATES, verbose_errors=False)
    matcher = LLMatcher(tokens, source, log_level=0, limits=limits)
    tried = matcher.deep_copy()  # to go back from a special token leaves a matcher that admits something else
    tried.compute_bitmask()  # some grammars are found to be too large only now, or where there is a choice
    if forced := tried.compute_ff_tokens():
        tried.consume_tokens(forced)
        tried.compute_bitmask()
    if tried.is_error():
        raise ValueError(_reason(tried.get_error()))
    return matcher


def _reason(told: str) -> str:
    """What llguidance says is wrong, in one line."""
    if told.startswith("NoExtensionBias"):
        return "no text is in it"
    first, *more = told.splitlines() or [""]
    return " ".join([first, *(line.removeprefix("error: ") for line in more if line.startswith("error: "))])


class _Vocabulary:
    """A token table as llguidance reads one; forced text is cut into single bytes, which takes as long."""

    bos_token_id = None

    def __init__(self, tokens: list[str], special_ids: list[int], eos_id: int) -> None:
        self.tokens = [piece.encode("latin-1") for piece in tokens]
        self.special_token_ids, self.eos_token_id = special_ids, eos_id
        self._ids = {piece: token for token, piece in enumerate(self.tokens)}

    def __call__(self, text: bytes) -> list[int]:
        return [self._ids[piece] for piece in (text[at : at + 1] for at in range(len(text))) if piece in self._ids]


def _serve() -> None:
    import resource

    from llguidance import LLTokenizer, TokenizerWrapper

    resource.setrlimit(resource.RLIMIT_AS, (_BYTES, _BYTES))
    lines = iter(sys.stdin.buffer.readline, b"")
    tokens, special_ids, eos_ids = json.loads(next(lines))
    tokenizer = LLTokenizer(TokenizerWrapper(_Vocabulary(tokens, special_ids, eos_ids[0])), eos_token=eos_ids)
    print(json.dumps(["", time.process_time()]), flush=True)
    for line in lines:
        source, seconds = json.loads(line)
        began = time.process_time()
        signal.setitimer(signal.ITIMER_PROF, seconds)
        try:
            matcher_of(tokenizer, source)
            answer = ""
        except ValueError as error:
            answer = str(error) or "it is no grammar"
        signal.setitimer(signal.ITIMER_PROF, 0)
        print(json.dumps([answer, time.process_time() - began]), flush=True)


if __name__ == "__main__":
    _serve()
