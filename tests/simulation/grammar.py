"""The formats that simulated completions keep to, what a device makes of them, and the same worked out anew.

The engine's own compiler compiles and follows grammars; only the model that chooses among what is left is made up.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from functools import cache, lru_cache
from typing import Any

from headrace.engine.grammar.compiled import CompiledGrammar
from headrace.engine.grammar.compiler import Grammars
from headrace.engine.grammar.jobs import GrammarJob
from headrace.engine.response_format import ResponseFormat
from headrace.engine.scheduling.plan import Capacity
from headrace.engine.scheduling.result import NoToken
from headrace.engine.scheduling.shaping import Grammar
from headrace.engine.testing import ScriptedEngine, scripted_token

__all__ = ["END", "FORMATS", "LONGEST_RUN", "Place", "compiled", "follows", "is_whole", "picked"]

END = 256
"""The token that ends a sequence."""

LONGEST_RUN = 12
"""Tokens that one of the formats forces at once."""

_SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"ab": {"enum": [1, 22, 223]}, "c": {"enum": ["x", "yz"]}},
    "required": ["ab", "c"],
    "additionalProperties": False,
}
FORMATS = [
    ResponseFormat.regex("(ab|cd)e{3}f*(gh)?"),
    ResponseFormat.regex("[a-d]{2,6}x+"),
    ResponseFormat.choice(["stone", "stony ground", "rain"]),
    ResponseFormat.json_schema(_SCHEMA),
]


def picked(seed: int, values: Sequence[int], allowed: Sequence[int]) -> int | NoToken:
    """The token of a choice of that seed after cells of those values, among what a grammar allows."""
    return allowed[scripted_token([seed, *values], len(allowed))] if allowed else NoToken.NOTHING_LEFT


def is_whole(wanted: ResponseFormat, text: str) -> bool:
    """Whether `text` is what was asked for, as others than the compiler see it."""
    if wanted.kind != "json_schema":
        return re.fullmatch(wanted.source, text) is not None
    value = json.loads(text)
    return set(value) == {"ab", "c"} and value["ab"] in (1, 22, 223) and value["c"] in ("x", "yz")


class Place:
    """Where one row of the device stands."""

    def __init__(self, grammar: Grammar, tokens: Sequence[int]) -> None:
        self._state = grammar.begin(tokens)
        self._ended = END in tokens

    def allowed(self) -> list[int]:
        """What may come next; nothing after the end."""
        return [] if self._ended else _ids(self._state.allowed())

    def advance(self, token: int | NoToken) -> list[int]:
        """Go on with what was chosen; what a forced text, if the token began one, goes on with."""
        forced = list(self._state.forced())
        self._ended = self._ended or token == END
        if not isinstance(token, NoToken):
            self._state.advance(token)
        return forced[1:] if forced[:1] == [token] else []


def _ids(mask: bytes) -> list[int]:
    return [8 * place + bit for place, byte in enumerate(mask) if byte for bit in range(8) if byte >> bit & 1]


@lru_cache(maxsize=1000)  # soon full, so that a long life holds no more in the end
def follows(wanted: ResponseFormat, tokens: tuple[int, ...]) -> list[int]:
    """What may come after `tokens`, found from the beginning."""
    return _ids(compiled(wanted).begin(tokens).allowed())


@cache
def compiled(wanted: ResponseFormat) -> CompiledGrammar:
    sizes = {"num_pages": 1, "page_size": 1, "max_rows": 1, "max_batched_tokens": 1, "max_context": 1}
    opened = ScriptedEngine(Capacity(vocab_size=END + 1, **sizes))._open()
    found = Grammars(lambda call: None)._compile(GrammarJob(wanted, opened))  # type: ignore[arg-type]
    return found
