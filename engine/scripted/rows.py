"""`ScriptedRow`: applies the options of one row of the scripted device to made-up logits; never runs a model.

Owns the counts of one row and its state in a grammar. Logits are a hash of the tokens before them, with the scripted
token far ahead of the others: the likeliest token is chosen, whatever the temperature. Next to read: testing.py.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from headrace.engine.scheduling.plan import RowOptions
from headrace.engine.scheduling.result import Chosen, NoToken
from headrace.engine.scheduling.shaping import Report
from headrace.engine.steps.shaped_logits import processed_logits, shaper_of

__all__ = ["ScriptedRow", "allowed_ids", "made_up_logits", "report"]

_Logits = NDArray[np.float32]
_SCRIPTED = 20.0
_CLOSING = {256: 15.0, ord('"'): 14.0, ord("}"): 13.0, ord("]"): 12.0, ord(","): 11.0}
"""Added to the logits of tokens that end a text in a grammar, if nothing is scripted, so that the text stays short."""


def made_up_logits(seed: int, vocab_size: int, token: int | None) -> _Logits:
    """Return float32 [vocabulary] from -2 to 2, and 20 for `token`; equal arguments give equal logits."""
    logits_V = np.random.default_rng(seed).random(vocab_size, np.float32) * 4 - 2
    if token is not None:
        logits_V[token] = _SCRIPTED
    return logits_V


def report(logits_V: _Logits, token: int, count: int) -> Report:
    """Return the log-probability and the rank of `token`, and the `count` likeliest tokens."""
    wide_V = logits_V.astype(np.float64)
    logprobs_V = wide_V - wide_V.max() - np.log(np.exp(wide_V - wide_V.max()).sum())
    order = np.lexsort((np.arange(len(wide_V)), -wide_V))[:count]
    top = tuple((int(each), float(logprobs_V[each])) for each in order)
    return Report(float(logprobs_V[token]), 1 + int((wide_V > wide_V[token]).sum()), top)


def allowed_ids(mask: bytes, vocab_size: int) -> NDArray[np.bool_]:
    """Return bool [vocabulary]: whether a mask of `GrammarState.allowed` allows each token."""
    allowed_V = np.zeros(vocab_size, np.bool_)
    bits = np.unpackbits(np.frombuffer(mask, np.uint8), bitorder="little")[:vocab_size]
    allowed_V[: len(bits)] = bits
    return allowed_V


class ScriptedRow:
    """One row with options, while one request holds it; one call at a time."""

    def __init__(self, options: RowOptions, vocab_size: int) -> None:
        """Begin after the tokens in `options`."""
        self.options = options
        self._shaper = None if options.shaping is None else shaper_of(options, options.shaping, vocab_size)
        grammar = options.grammar
        self._state = None if grammar is None else grammar.begin(options.tokens[options.prompt_len :])

    def choose(self, tokens: Sequence[int], logits_V: _Logits, *, scripted: bool) -> Chosen:
        """Choose the token after `tokens`, the row's prompt and completion so far.

        Args:
            tokens: Token ids as the device reads them from the row's pages.
            logits_V: float32 [vocabulary]; changed in place.
            scripted: Whether an answer is scripted for the row.

        Returns:
            The token or `NoToken.NOTHING_LEFT`, and the report on it if one is wanted.

        Raises:
            HookFailed: The row's hook raised, or returned something other than logits.
        """
        options = self.options
        top = None if options.reporting is None else options.reporting.completion
        given_V = None if top is None else logits_V.copy()
        if options.processor is not None:
            logits_V = processed_logits(options.processor, list(tokens), logits_V)
        if self._shaper is not None and not self._shaper.shape(logits_V, np.array(tokens)):
            return NoToken.NOTHING_LEFT, None
        if self._state is not None:
            if not scripted:
                for token, bonus in _CLOSING.items():
                    logits_V[token : token + 1] += bonus
            logits_V[~allowed_ids(self._state.allowed(), len(logits_V))] = -np.inf
        if logits_V.max() == -np.inf:
            return NoToken.NOTHING_LEFT, None
        token = int(logits_V.argmax())
        if self._shaper is not None:
            self._shaper.append(token)
        if self._state is not None:
            self._state.advance(token)
        return token, None if given_V is None or top is None else report(given_V, token, top)
