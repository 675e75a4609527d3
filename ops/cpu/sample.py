"""Chooses next tokens from logits on the CPU; has no state: noise comes from (seed, position, token id) only.

A sampled token is the largest `logit / temperature + Gumbel noise` (Gumbel-max), so it depends only on its own row's
logits and parameters. If logits differ in their last bits, as they do in reduced precision between batches of other
sizes, or on a GPU, whose noise is the same, the token changes only at near ties.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from headrace.ops.cpu.noise import RARE, RARELY, gumbel, words, words_of

__all__ = ["Choosing", "sample", "sample_drafts"]

NON_FINITE = -1
_NOISE_RANGE = 26.0  # more than the difference between the largest and the smallest noise that 32 bits can give
_FEW = 3000  # tokens: if no more can win, noise is drawn only for these
_FIRST_SORTED = 512  # most top-p sets are this small: sort no more of the vocabulary than is needed


class Choosing(NamedTuple):
    """Parameters by which one row's next token is chosen."""

    temperature: float
    top_k: int
    top_p: float
    min_p: float
    seed: int
    position: int
    """Place of the new token in its sequence."""


def sample(logits_RV: Tensor, rows: Sequence[Choosing], ids_V: Tensor | None = None) -> list[int]:
    """Choose one token for each row.

    Args:
        logits_RV: float [rows, vocabulary].
        rows: Parameters of each row; temperature 0 takes the largest logit, the first of equals.
        ids_V: Token id of each logit, int64; None if they are 0 to vocabulary - 1.

    Returns:
        One id for each row; -1 if the row's largest logit is NaN or infinite.
    """
    ids = None if ids_V is None else ids_V.numpy()
    logits_RV = logits_RV.float()
    best_R = logits_RV.numpy().argmax(-1)  # 5 to 30 times as fast as torch's; both take NaN as the largest
    largest_R = np.take_along_axis(logits_RV.numpy(), best_R[:, None], 1)[:, 0]
    chosen: list[int] = np.where(np.isfinite(largest_R), best_R, NON_FINITE).tolist()
    for index, row in enumerate(rows):
        if row.temperature > 0.0 and chosen[index] != NON_FINITE:
            chosen[index] = _sample_row(logits_RV[index], row, ids)
    return chosen if ids is None else [each if each == NON_FINITE else int(ids[each]) for each in chosen]


def sample_drafts(logits_RV: Tensor, rows: Sequence[Choosing], ids_V: Tensor | None = None) -> list[int]:
    """Choose one token for each row as `sample` does, to be verified; any token where that would be -1.

    With the noise by which the target will choose at the same position, a draft is right far more often than the
    likeliest token would be (Daliri, Musco and Suresh, 2024).
    """
    return [max(each, 0) for each in sample(logits_RV, rows, ids_V)]


def _sample_row(logits_V: Tensor, row: Choosing, ids_V: NDArray[np.int64] | None) -> int:
    """Return the place of the chosen logit."""
    temperature = min(max(row.temperature, 1e-6), 1e30)
    if 0 < row.top_k < len(logits_V):
        # Compare logits: at high temperatures, distinct logits have equal probabilities in float32.
        logits_V = torch.where(logits_V >= torch.topk(logits_V, row.top_k).values[-1], logits_V, -math.inf)
    scaled_V = (logits_V * (1.0 / temperature)).numpy()
    if not math.isfinite(scaled_V.max()):
        scaled_V = ((logits_V - logits_V.max()) / temperature).numpy()
    may_win_V = scaled_V >= scaled_V.max() - _NOISE_RANGE
    if row.top_p < 1.0 or row.min_p > 0.0:
        probs_V = torch.softmax(torch.from_numpy(scaled_V), dim=-1)
        may_win_V &= (probs_V >= _least_probability(probs_V, row)).numpy()
    if np.count_nonzero(may_win_V) <= _FEW:
        (at,) = np.nonzero(may_win_V)
        words_N = words_of(row.seed, row.position, at if ids_V is None else ids_V[at])
    else:
        words_V = words(row.seed, row.position, len(scaled_V) if ids_V is None else int(ids_V.max()) + 1)
        words_V = words_V if ids_V is None else words_V[ids_V]  # `words_of` takes four times as long for so many
        rare_V = (words_V < RARELY) & may_win_V
        (at,) = np.nonzero(rare_V)
        reached = (scaled_V[at] + gumbel(words_V[at])).max(initial=-np.inf)
        # For most other tokens, the word shows without a logarithm that the noise is too small.
        (at,) = np.nonzero(rare_V | (may_win_V & (scaled_V >= reached - RARE)))
        words_N = words_V[at]
    return int(at[(scaled_V[at] + gumbel(words_N)).argmax()])


def _least_probability(probs_V: Tensor, row: Choosing) -> float:
    """Return the smallest probability that passes min-p, and top-p of what top-k leaves; ties stay together."""
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
