"""Compiles grammars for `Trials` in a process of its own, which may be ended at any time; keeps none of them.

Run by child_start.py; imports nothing of headrace. All lines are JSON. The first is the vocabulary, each later one a
grammar. The answer to each is a line: an error message, or an empty text, and the seconds of processor time that the
answer took. The engine uses `matcher_of` as well.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

__all__ = ["answers", "matcher_of"]

_STATES: Final = 50_000  # at some 60 bytes each, in a lexer that rows of one format share
_BYTES: Final = 4 << 30  # bytes of address space


def matcher_of(tokens: LLTokenizer, source: str) -> LLMatcher:
    """Return a matcher of a grammar in llguidance's form that has consumed nothing and whose first masks can be found.

    Raises:
        ValueError: The grammar gives no such matcher.
    """
    from llguidance import LLMatcher, LLParserLimits

    limits = LLParserLimits(max_lexer_states=_STATES, verbose_errors=False)
    matcher = LLMatcher(tokens, source, log_level=0, limits=limits)
    tried = matcher.deep_copy()  # going back from a special token would change what the matcher admits
    tried.compute_bitmask()  # some grammars prove too large only here, or at the first choice
    if forced := tried.compute_ff_tokens():
        tried.consume_tokens(forced)
        tried.compute_bitmask()
    if tried.is_error():
        raise ValueError(_reason(tried.get_error()))
    return matcher


def _reason(told: str) -> str:
    """Return llguidance's error message in one line."""
    if told.startswith("NoExtensionBias"):
        return "no text is in it"
    first, *more = told.splitlines() or [""]
    return " ".join([first, *(line.removeprefix("error: ") for line in more if line.startswith("error: "))])


class _Vocabulary:
    """The token table in the form that llguidance reads; forced text is cut into single bytes, which takes as long."""

    bos_token_id = None

    def __init__(self, tokens: list[str], special_ids: list[int], eos_id: int) -> None:
        self.tokens = [piece.encode("latin-1") for piece in tokens]
        self.special_token_ids = special_ids
        self.eos_token_id = eos_id
        self._ids = {piece: token for token, piece in enumerate(self.tokens)}

    def __call__(self, text: bytes) -> list[int]:
        return [self._ids[piece] for piece in (text[at : at + 1] for at in range(len(text))) if piece in self._ids]


def answers(lines: Iterator[bytes]) -> Iterator[bytes]:
    """Read the vocabulary, then try one grammar after another."""
    import resource

    from llguidance import LLTokenizer, TokenizerWrapper

    resource.setrlimit(resource.RLIMIT_AS, (_BYTES, _BYTES))
    tokens, special_ids, eos_ids = json.loads(next(lines))
    tokenizer = LLTokenizer(TokenizerWrapper(_Vocabulary(tokens, special_ids, eos_ids[0])), eos_token=eos_ids)
    yield json.dumps(["", time.process_time()]).encode()
    for line in lines:
        began = time.process_time()
        try:
            matcher_of(tokenizer, json.loads(line))
            answer = ""
        except ValueError as error:
            answer = str(error) or "it is no grammar"
        yield json.dumps([answer, time.process_time() - began]).encode()
