"""What a request asks of its logits beyond `Sampling`, and what it is told about them; plain values, never arrays.

Rows that ask for nothing here have None in its place: neither scheduler nor runner does anything for them. The parts
are shaped for a device that keeps rows in arrays. What never changes while a row lives (bias, masks) is a sparse list
or a set of ids, sent once with the row; what changes with every token (counts, the end of a bad word) follows from the
row's own tokens, which the device has, so nothing is sent for a step. Next to read: plan.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, TypeAlias

__all__ = [
    "Choice",
    "LogitsProcessor",
    "MOST_WORD_TOKENS",
    "Grammar",
    "GrammarState",
    "Report",
    "ReportedTokens",
    "Reporting",
    "Shaping",
]

MOST_WORD_TOKENS = 4096
"""Tokens of all bad words of a row, which a device may keep in a place of fixed size."""


@dataclass(frozen=True, slots=True)
class Shaping:
    """How a row's logits are changed before `Sampling` chooses among them, in the order of the fields."""

    bias: tuple[tuple[int, float], ...] = ()
    """(token id, what is added to its logit)."""
    repetition_penalty: float = 1.0
    """Divides positive logits and multiplies others, of tokens in the prompt or the completion."""
    frequency_penalty: float = 0.0
    """Subtracted for each time that the completion holds a token."""
    presence_penalty: float = 0.0
    """Subtracted if the completion holds a token."""
    allowed: tuple[int, ...] | None = None
    """The only ids that may be chosen."""
    forbidden: tuple[int, ...] = ()
    """Ids that may not be chosen."""
    min_length: int = 0
    """Tokens of prompt and completion before which nothing of `stops` may be chosen."""
    stops: tuple[int, ...] = ()
    bad_words: tuple[tuple[int, ...], ...] = ()
    """Sequences of two ids or more; the last may not be chosen where the others stand before it. Together they have
    at most `MOST_WORD_TOKENS` ids."""


@dataclass(frozen=True, slots=True)
class Reporting:
    """Which log-probabilities a request wants: how many of the likeliest tokens beside the one that is there."""

    completion: int | None = None
    """For tokens of the completion; None where none are wanted."""
    prompt: int | None = None
    """For tokens of the prompt but the first."""


class GrammarState(Protocol):
    """Where one row stands in its grammar; used by one thread at a time."""

    def advance(self, token: int) -> None:
        """Go on with a token that was allowed."""
        ...

    def forced(self) -> Sequence[int]:
        """The tokens that must come next, as the tokenizer cuts a text about which there is no choice; often none."""
        ...

    def allowed(self) -> bytes:
        """Bit `i % 8` of byte `i // 8` for each token id `i` that may come next; empty where the grammar has failed.

        Of a forced text the first token alone. A device that keeps masks packed can copy it as it is: it is a whole
        number of 32-bit words, of which those at its end that allow nothing may be missing.
        """
        ...


class Grammar(Protocol):
    """What the text of a completion must keep to; compiled, and shared by all rows that want it."""

    def begin(self, tokens: Sequence[int]) -> GrammarState:
        """The state after the tokens of a completion, none for a new one."""
        ...

    def fill(self, states: Sequence[tuple[GrammarState, Sequence[int], int]], masks: memoryview) -> None:
        """Let many states, of this grammar and others of the same engine, go on, and find what `allowed` gives then.

        May run in several threads at once, which find the masks of other states.

        Args:
            states: Each with the allowed tokens that it goes on with, and the line that its mask goes to.
            masks: Writable, contiguous, two dimensions: 32-bit words of as many lines as there are; those of a grammar
                that has failed become 0.
        """
        ...


LogitsProcessor: TypeAlias = Callable[[list[int], Any], Any]
"""A caller's own code: from the tokens so far and the next one's logits, a writable float32 array [vocabulary], it
makes the logits to choose from."""


class Report(NamedTuple):
    """Log-probabilities at one position, from the logits as the model gave them."""

    logprob: float
    """Log-probability of the token at the position."""
    rank: int
    """Number of likelier tokens, plus 1."""
    top: tuple[tuple[int, float], ...]
    """(token id, log-probability) of the likeliest tokens, in falling order, lower ids first among equals."""


Choice: TypeAlias = Callable[[], tuple[int, Report | None]]
"""Makes one choice of a token on the host, in the time that the caller's own code takes; called once, in any thread."""


class ReportedTokens(list[int]):
    """What a step returns where some of its rows want more than a token: its token ids, and all that."""

    def __init__(
        self,
        tokens: Iterable[int],
        chosen: Mapping[int, Report],
        prompts: Mapping[int, list[Report]],
        pooled: Mapping[int, Any] | None = None,
        choices: Mapping[int, Choice] | None = None,
        forced: Mapping[int, Sequence[int]] | None = None,
    ) -> None:
        """Hold one id for each work.

        Args:
            tokens: One id for each work.
            chosen: Index of a work -> the report on its sampled token.
            prompts: Index of a work -> reports on the tokens of the prompt from position `start + 1` of the work.
            choices: Index of a work whose token is `CHOSEN_LATER` -> what chooses it.
            forced: Index of a work -> tokens that must follow its own, as its row's grammar is.
            pooled: Index of a work that ends a pooled request -> what came of its hidden states.
        """
        super().__init__(tokens)
        self.chosen = chosen
        self.prompts = prompts
        self.pooled = pooled or {}
        self.choices = choices or {}
        self.forced = forced or {}
