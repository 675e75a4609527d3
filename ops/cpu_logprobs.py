"""Log-probabilities, ranks and the likeliest tokens from logits on the CPU, in float32; never changes the logits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

__all__ = ["Logprobs", "logprobs"]


class Logprobs(NamedTuple):
    """At one position."""

    logprob: float
    rank: int
    top: tuple[tuple[int, float], ...]


def logprobs(logits_SV: Tensor, tokens: Sequence[int], counts: Sequence[int]) -> list[Logprobs]:
    """Natural-log softmax at each position.

    Args:
        logits_SV: float [positions, vocabulary].
        tokens: The token that is at each position.
        counts: How many of the likeliest tokens are wanted at each, at most the vocabulary's size.

    Returns:
        For each position the token's log-probability, its rank (1 and how many are likelier), and the likeliest tokens
        in falling order, lower ids first among equals.
    """
    if not len(tokens):
        return []
    logits_SV = logits_SV.float()
    normaliser_S1 = torch.logsumexp(logits_SV, dim=-1, keepdim=True)
    own_S1 = logits_SV.gather(1, torch.tensor(tokens)[:, None])
    ranks = ((logits_SV > own_S1).sum(-1) + 1).tolist()
    own = (own_S1 - normaliser_S1)[:, 0].tolist()
    tops: list[tuple[tuple[int, float], ...]] = []
    for index, count in enumerate(counts):
        tops.append(_top(logits_SV[index], count, normaliser_S1[index]) if count else ())
    return [Logprobs(*values) for values in zip(own, ranks, tops, strict=True)]


def _top(logits_V: Tensor, count: int, normaliser_1: Tensor) -> tuple[tuple[int, float], ...]:
    least = torch.topk(logits_V, min(count, len(logits_V))).values[-1]
    ids = (logits_V >= least).nonzero()[:, 0]  # ascending, and with all equals of the last
    values, order = torch.sort(logits_V[ids], descending=True, stable=True)
    found = zip(ids[order].tolist(), (values - normaliser_1).tolist(), strict=True)
    return tuple(found)[:count]
