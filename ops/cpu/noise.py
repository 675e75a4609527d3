"""The noise of sampled tokens on the CPU, equal to that of the GPU's kernel, from (seed, position, token id) only.

Owns no state. Random words come from Philox 4x32-7 (Salmon et al., 2011), a generator without a state: the seed is the
key, and one counter gives the words of four token ids. ops/cuda/sampling/sample.py draws the same words.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

__all__ = ["RARE", "RARELY", "gumbel", "words", "words_of"]

_Words: TypeAlias = NDArray[np.uint64]

_LOW: Final = np.uint64(0xFFFFFFFF)
_HALF: Final = np.uint64(32)
_FACTORS: Final = (np.uint64(0xD2511F53), np.uint64(0xCD9E8D57))
_KEY_STEPS: Final = (0x9E3779B9, 0xBB67AE85)
_ROUNDS: Final = 7
_LANES: Final = 1024  # counters of one block of 4,096 token ids; each of a counter's four words serves one quarter

RARE: Final = 4.0
RARELY: Final = np.uint32(0.0182 * 2**32)
"""Threshold from which words make noise below `RARE`: all words but one in 55."""


def words(seed: int, position: int, count: int) -> NDArray[np.uint32]:
    """Return random 32-bit words for the token ids from 0 on.

    Args:
        seed: Seed, of which the lowest 64 bits count.
        position: Position of the new token, of which the lowest 32 bits count.
        count: Number of token ids.

    Returns:
        uint32 [count].
    """
    blocks = _philox(seed, position, *_counted(-(-count // (4 * _LANES)) * _LANES))
    return np.stack([each.astype(np.uint32).reshape(-1, _LANES) for each in blocks], 1).reshape(-1)[:count]


def words_of(seed: int, position: int, ids_N: NDArray[np.int64]) -> NDArray[np.uint32]:
    """Return the words that `words` gives to `ids_N`: uint32 [N]."""
    counters = ids_N // (4 * _LANES) * _LANES + ids_N % _LANES
    four = np.stack(_philox(seed, position, *_first_round(counters.astype(np.uint64))))
    return four[ids_N // _LANES % 4, np.arange(len(ids_N))].astype(np.uint32)


def gumbel(words_N: NDArray[np.uint32]) -> NDArray[np.float32]:
    """Return -log(E) for exponential E, Gumbel noise, which falls as words rise; exact for small E, since these win."""
    part_N = np.minimum((words_N.astype(np.float32) + np.float32(0.5)) * np.float32(2**-32), np.float32(0.99999994))
    small_N = part_N * (1 + part_N * (np.float32(0.5) + part_N * np.float32(1 / 3)))
    noise_N: NDArray[np.float32] = -np.log(np.where(part_N < np.float32(0.01), small_N, -np.log(1 - part_N)))
    return noise_N


def _philox(seed: int, position: int, second: _Words, c3: _Words) -> tuple[_Words, _Words, _Words, _Words]:
    """Return the four words of each counter; `second` and `c3` are the results of `_first_round`."""
    low, high = seed & 0xFFFFFFFF, seed >> 32 & 0xFFFFFFFF
    c0 = np.full_like(second, (position & 0xFFFFFFFF) ^ low)
    c1 = np.zeros_like(second)
    c2 = second ^ np.uint64(high)
    for turn in range(1, _ROUNDS):
        a, b = c0 * _FACTORS[0], c2 * _FACTORS[1]
        c0, c2 = b >> _HALF, a >> _HALF
        c0 ^= c1
        c0 ^= np.uint64(low + turn * _KEY_STEPS[0] & 0xFFFFFFFF)
        c2 ^= c3
        c2 ^= np.uint64(high + turn * _KEY_STEPS[1] & 0xFFFFFFFF)
        c1, c3 = b & _LOW, a & _LOW
    return c0, c1, c2, c3


def _first_round(counters: _Words) -> tuple[_Words, _Words]:
    product = counters * _FACTORS[0]
    return product >> _HALF, product & _LOW


@lru_cache(maxsize=4)
def _counted(counters: int) -> tuple[_Words, _Words]:
    return _first_round(np.arange(counters, dtype=np.uint64))
