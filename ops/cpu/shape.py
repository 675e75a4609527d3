"""`Shaper`: changes one row's logits on the CPU before a token is chosen: bias, penalties, masks; never chooses one.

A row's counts are kept as the few ids that it holds and how often, so that a step's cost depends on the row's distinct
tokens, not on the size of the vocabulary, and each new token costs one addition.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

__all__ = ["Shaper"]

_Ids = NDArray[np.int64]


class Shaper:
    """Shaping of one row's logits, with the counts that it needs."""

    def __init__(
        self,
        *,
        tokens: Sequence[int],
        prompt_len: int,
        vocab_size: int,
        bias: Sequence[tuple[int, float]],
        repetition_penalty: float,
        frequency_penalty: float,
        presence_penalty: float,
        allowed: Sequence[int] | None,
        forbidden: Sequence[int],
        min_length: int,
        stops: Sequence[int],
        bad_words: Sequence[Sequence[int]],
    ) -> None:
        """Count `tokens`, the first `prompt_len` of them the prompt; see engine/scheduling/shaping.py for the rest."""
        self._bias_ids: _Ids = np.array([token for token, _ in bias], np.int64)
        self._bias = np.array([value for _, value in bias], np.float32)
        self._penalties: _Penalties | None = None
        if repetition_penalty != 1.0 or frequency_penalty or presence_penalty:
            penalties = _Penalties(vocab_size, repetition_penalty, frequency_penalty, presence_penalty)
            penalties.count(tokens, prompt_len)
            self._penalties = penalties
        self._banned_V: NDArray[np.bool_] | None = None
        if allowed is not None:
            self._banned_V = np.ones(vocab_size, np.bool_)
            self._banned_V[list(allowed)] = False
        self._forbidden: _Ids = np.array(forbidden, np.int64)
        self._min_length = min_length
        self._stops: _Ids = np.array(stops, np.int64)
        self._bad_words: dict[int, list[tuple[_Ids, int]]] = {}
        for *before, last in bad_words:
            self._bad_words.setdefault(before[-1], []).append((np.array(before, np.int64), last))

    def append(self, token: int) -> None:
        """Count a token that the row has just sampled."""
        if self._penalties is not None:
            self._penalties.add(token, 1)

    def shape(self, logits_V: NDArray[np.float32], tokens: _Ids) -> bool:
        """Change `logits_V` in place for the token that follows `tokens`, the row's prompt and completion so far.

        Returns:
            Whether a token is left to choose. Logits whose largest is not finite stay as they are; the result is True.
        """
        if not math.isfinite(logits_V.max()):
            return True
        with np.errstate(over="ignore"):  # sampling reports the infinities, as it does all that is not finite
            logits_V[self._bias_ids] += self._bias
            if self._penalties is not None:
                self._penalties.apply(logits_V)
        if self._banned_V is not None:
            np.copyto(logits_V, -np.inf, where=self._banned_V)
        logits_V[self._forbidden] = -np.inf
        if len(tokens) < self._min_length:
            logits_V[self._stops] = -np.inf
        if self._bad_words:
            for before, last in self._bad_words.get(int(tokens[-1]), ()):
                if np.array_equal(tokens[-len(before) :], before):
                    logits_V[last] = -np.inf
        return bool(logits_V.max() > -np.inf)


class _Penalties:
    """The distinct tokens of a row, and how often its completion holds each."""

    def __init__(self, vocab_size: int, repetition: float, frequency: float, presence: float) -> None:
        self._repetition = np.float32(repetition)
        self._frequency = np.float32(frequency)
        self._presence = np.float32(presence)
        self._place_V: NDArray[np.int32] = np.full(vocab_size, -1, np.int32)
        self._ids: _Ids = np.zeros(0, np.int64)
        self._counts: NDArray[np.float32] = np.zeros(0, np.float32)
        self._size = 0

    def count(self, tokens: Sequence[int], prompt_len: int) -> None:
        ids, place_of = np.unique(np.array(tokens, np.int64), return_inverse=True)
        size = max(64, 2 * len(ids))
        self._ids, self._counts = np.zeros(size, np.int64), np.zeros(size, np.float32)
        self._ids[: len(ids)] = ids
        self._counts[: len(ids)] = np.bincount(place_of[prompt_len:], minlength=len(ids))
        self._place_V[ids] = np.arange(len(ids))
        self._size = len(ids)

    def add(self, token: int, times: int) -> None:
        place = int(self._place_V[token])
        if place < 0:
            place = self._size
            if place == len(self._ids):
                self._ids = np.concatenate((self._ids, np.zeros_like(self._ids)))
                self._counts = np.concatenate((self._counts, np.zeros_like(self._counts)))
            self._place_V[token] = place
            self._ids[place] = token
            self._size += 1
        self._counts[place] += times

    def apply(self, logits_V: NDArray[np.float32]) -> None:
        ids, counts = self._ids[: self._size], self._counts[: self._size]
        logits = logits_V[ids]
        logits = np.where(logits > 0, logits / self._repetition, logits * self._repetition)
        logits_V[ids] = logits - self._frequency * counts - self._presence * (counts > 0)
