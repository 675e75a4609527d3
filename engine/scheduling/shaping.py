"""Options of a request that change or report its logits beyond `Sampling`, as plain values; never holds an array.

A row without any of them has None in their place: neither scheduler nor runner does anything for it. The values are
shaped for a device that keeps rows in arrays. Options that never change while a row lives (bias, masks) are a sparse
list or a set of ids, sent once with the row. Values that change with every token (counts, the end of a bad word) follow
from the row's own tokens, which the device has, so a step sends nothing for them. Next to read: plan.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, TypeAlias

__all__ = [
    "LogitsProcessor",
    "MOST_WORD_TOKENS",
    "Grammar",
    "GrammarState",
    "Report",
    "Reporting",
    "Shaping",
]

MOST_WORD_TOKENS = 4096
"""Maximum number of tokens of all bad words of a row, so that a device may keep them in an array of fixed size."""


@dataclass(frozen=True, slots=True)
class Shaping:
    """Changes to a row's logits before `Sampling` chooses among them, applied in the order of the fields."""

    bias: tuple[tuple[int, float], ...] = ()
    """(token id, value added to its logit) pairs."""
    repetition_penalty: float = 1.0
    """Divisor of positive logits, and factor of the others, for tokens in the prompt or the completion."""
    frequency_penalty: float = 0.0
    """Value subtracted from a logit for each time that the completion holds the token."""
    presence_penalty: float = 0.0
    """Value subtracted from a logit if the completion holds the token."""
    allowed: tuple[int, ...] | None = None
    """Only token ids that may be chosen; None for all."""
    forbidden: tuple[int, ...] = ()
    """Token ids that may not be chosen."""
    min_length: int = 0
    """Number of tokens of prompt and completion before which no id of `stops` may be chosen."""
    stops: tuple[int, ...] = ()
    bad_words: tuple[tuple[int, ...], ...] = ()
    """Sequences of two or more token ids, whose last may not be chosen after the others. Together they have at most
    `MOST_WORD_TOKENS` ids."""


@dataclass(frozen=True, slots=True)
class Reporting:
    """Log-probabilities that a request wants: the number of likeliest tokens to report besides the token itself."""

    completion: int | None = None
    """Number of likeliest tokens at each completion token; None for no reports."""
    prompt: int | None = None
    """Number of likeliest tokens at each prompt token but the first; None for no reports."""


class GrammarState(Protocol):
    """Position of one row in its grammar; used by one thread at a time."""

    def advance(self, token: int) -> None:
        """Advance by a token that was allowed."""
        ...

    def rollback(self, count: int) -> None:
        """Go back to where the row was before the last `count` tokens of `advance`."""
        ...

    def forced(self) -> Sequence[int]:
        """Return the tokens that must come next, as the tokenizer splits the text that is forced; often none."""
        ...

    def allowed(self) -> bytes:
        """Return a mask with bit `i % 8` of byte `i // 8` set for each token id `i` that may come next.

        For a forced text only its first token is set. The mask is empty if the grammar has failed. It is a whole number
        of 32-bit words, so that a device with packed masks can copy it; trailing words without set bits may be missing.
        """
        ...


class Grammar(Protocol):
    """Compiled constraint on the text of a completion, shared by all rows that use it."""

    def begin(self, tokens: Sequence[int]) -> GrammarState:
        """Return the state after the given tokens of a completion; an empty sequence begins a new one."""
        ...

    def fill(self, states: Sequence[tuple[GrammarState, Sequence[int], int]], masks: memoryview) -> None:
        """Advance many states, of this grammar and others of the same engine, and write the masks that follow.

        May run in several threads at once, each with other states.

        Args:
            states: (state, allowed tokens to advance it by, row of `masks` to write) triples.
            masks: Writable contiguous buffer of 32-bit words [rows, words]; the row of a failed grammar becomes 0.
        """
        ...


LogitsProcessor: TypeAlias = Callable[[list[int], Any], Any]
"""A caller's own function from the tokens so far and the next token's logits, a writable float32 array [vocabulary], to
the logits to choose from."""


class Report(NamedTuple):
    """Log-probabilities at one position, from the unchanged logits of the model."""

    logprob: float
    """Log-probability of the token at the position."""
    rank: int
    """Number of likelier tokens, plus 1."""
    top: tuple[tuple[int, float], ...]
    """(token id, log-probability) pairs of the likeliest tokens, in falling order, lower ids first among equals."""
