"""Log-probabilities, ranks and the likeliest tokens from logits on the CPU, in float32; never changes the logits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

__all__ = ["Logprobs", "logprobs"]


class Logprobs(NamedTuple):
    """Log-probabilities at one position."""

    logprob: float
    rank: int
    top: tuple[tuple[int, float], ...]


def logprobs(logits_SV: Tensor, tokens: Sequence[int], counts: Sequence[int]) -> list[Logprobs]:
    """Return natural-log softmax results at each position; for logits that are not finite, they mean nothing.

    Args:
        logits_SV: float [positions, vocabulary].
        tokens: The token at each position.
        counts: Number of likeliest tokens wanted at each position, at most the vocabulary's size.

    Returns:
        For each position the token's log-probability, its rank (1 + how many are likelier), and the likeliest tokens
        in falling order, lower ids first among equals.
    """
    rows = logits_SV.float().numpy()  # numpy's passes over one row take a fraction of torch's time
    with np.errstate(all="ignore"):
        return [_of_row(*each) for each in zip(rows, tokens, counts, strict=True)]


def _of_row(logits_V: NDArray[np.float32], token: int, count: int) -> Logprobs:
    most = logits_V.max()
    normaliser = most + np.log(np.exp(logits_V - most).sum())
    rank = 1 + int(np.count_nonzero(logits_V > logits_V[token]))
    return Logprobs(float(logits_V[token] - normaliser), rank, _top(logits_V, min(count, len(logits_V)), normaliser))


def _top(logits_V: NDArray[np.float32], count: int, normaliser: np.float32) -> tuple[tuple[int, float], ...]:
    if not count:
        return ()
    least = np.partition(logits_V, -count)[-count]
    ids = np.flatnonzero(logits_V >= least)  # ascending, including all that equal the last
    ids = ids[np.argsort(-logits_V[ids], kind="stable")][:count]
    return tuple(zip(ids.tolist(), (logits_V[ids] - normaliser).tolist(), strict=True))
