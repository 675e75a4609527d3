"""Chooses next tokens from logits on the CPU; never keeps a state: noise comes from (seed, position, token id) alone.

A sampled token is the largest `logit / temperature + Gumbel noise` (Gumbel-max), so it depends on its own row's logits
and parameters and on nothing else; and where those logits differ in their last bits, as they do in reduced precision
between batches of other sizes, it is the same one but for near ties.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

__all__ = ["Choosing", "sample", "uniforms"]

NON_FINITE = -1
_MASK = 2**64 - 1
_GOLDEN = 0x9E3779B97F4A7C15
_NOISE_RANGE = 42.0  # more than between the largest and the smallest that 52 bits can give
_FIRST_SORTED = 512  # most top-p sets are this small: sort no more of the vocabulary than is needed


class Choosing(NamedTuple):
    """How one row's next token is chosen."""

    temperature: float
    top_k: int
    top_p: float
    min_p: float
    seed: int
    position: int
    """Place of the new token in its sequence."""


def uniforms(seed: int, position: int, ids: NDArray[np.int64]) -> NDArray[np.float64]:
    """Numbers in (0, 1), one for each id, that depend on the arguments alone.

    They are the outputs number `ids` of SplitMix64 (Steele et al., 2014) in the state that seed and position make.
    """
    state = _mix((_mix(seed & _MASK) + position) & _MASK)
    values = (ids.astype(np.uint64) + np.uint64(1)) * np.uint64(_GOLDEN) + np.uint64(state)
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    values ^= values >> np.uint64(31)
    return ((values >> np.uint64(12)).astype(np.float64) + 0.5) / float(1 << 52)  # exact, and never 0 or 1


def _mix(value: int) -> int:
    value = (value + _GOLDEN) & _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)


def sample(logits_RV: Tensor, rows: Sequence[Choosing]) -> list[int]:
    """Choose one token for each row.

    Args:
        logits_RV: float [rows, vocabulary].
        rows: How to choose; temperature 0 takes the largest logit, the first of equals.

    Returns:
        One id a row; -1 where the row's largest logit is NaN or infinite.
    """
    logits_RV = logits_RV.float()
    best_R = logits_RV.numpy().argmax(-1)  # 5 to 30 times as fast as torch's; NaN counts as the largest in both
    largest_R = np.take_along_axis(logits_RV.numpy(), best_R[:, None], 1)[:, 0]
    chosen: list[int] = np.where(np.isfinite(largest_R), best_R, NON_FINITE).tolist()
    for index, row in enumerate(rows):
        if row.temperature > 0.0 and chosen[index] != NON_FINITE:
            chosen[index] = _sample_row(logits_RV[index], row)
    return chosen


def _sample_row(logits_V: Tensor, row: Choosing) -> int:
    if 0 < row.top_k < len(logits_V):
        # On the logits: at high temperatures float32 makes distinct ones equal in probability.
        logits_V = torch.where(logits_V >= torch.topk(logits_V, row.top_k).values[-1], logits_V, -math.inf)
    # Between these bounds float32 can divide by it; past them nothing changes any more.
    scaled_V = (logits_V - logits_V.max()) / min(max(row.temperature, 1e-6), 1e30)
    may_win_V = scaled_V > -_NOISE_RANGE
    if row.top_p < 1.0 or row.min_p > 0.0:
        probs_V = torch.softmax(scaled_V, dim=-1)
        may_win_V &= probs_V >= _least_probability(probs_V, row)
    ids = may_win_V.nonzero()[:, 0].numpy()
    scores = scaled_V.numpy()[ids] - np.log(-np.log(uniforms(row.seed, row.position, ids)))
    return int(ids[scores.argmax()])


def _least_probability(probs_V: Tensor, row: Choosing) -> float:
    """The smallest probability that top-p, of what top-k left, and min-p let through; ties stay together."""
    least = row.min_p * float(probs_V.max()) if row.min_p > 0.0 else 0.0
    if row.top_p >= 1.0:
        return least
    count = min(len(probs_V), _FIRST_SORTED)
    while True:
        top = torch.topk(probs_V, count).values
        inside = int(torch.searchsorted(top.cumsum(0, dtype=torch.float64), row.top_p))
        if inside < count or count == len(probs_V):
            return max(least, float(top[min(inside, count - 1)]))
        count = min(len(probs_V), count * 8)
