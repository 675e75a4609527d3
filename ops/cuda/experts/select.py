"""`select`: the experts of a program's tokens by their logits on CUDA (Triton), as `route` of ops/experts.py specifies.

A function that kernels call: it stores the choice, and launches nothing. Sums over experts are in the same order for
all programs of as many rows, experts and warps. K chosen experts of a token.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import triton
import triton.language as tl

if TYPE_CHECKING:
    from headrace.ops.routing import Routing

__all__ = ["constants_of", "select"]

_LOWEST: Final = tl.constexpr(-3.0e38)
"""Stands for a score that is no number, so that an expert is chosen all the same."""


def constants_of(routing: Routing) -> dict[str, Any]:
    """Return the arguments of `select` that are known when a kernel is compiled, by name."""
    return {
        "K": routing.top_k,
        "RANKS": triton.next_power_of_2(routing.top_k),
        "SCORE": routing.score,
        "RENORMALISE": routing.renormalise,
        "GROUPS": routing.groups,
        "PADDED": triton.next_power_of_2(routing.groups),
        "TOP_GROUPS": routing.top_groups,
        "TWO": routing.group_score == "top2",
    }


@triton.jit
def _best(key, column):
    """Return the number of the largest key of each row, the lowest of equal ones, and where it is."""
    best = tl.argmax(key, axis=1, tie_break_left=True)
    return best, column[None, :] == best[:, None]


@triton.jit
def _scores_of(logit, known, SCORE: tl.constexpr):
    """Return the scores of experts, and what lies beyond them as -inf."""
    score = logit
    if SCORE == "softmax":
        e = tl.exp(logit - tl.max(logit, axis=1)[:, None])
        score = tl.div_rn(e, tl.zeros_like(e) + tl.sum(e, axis=1)[:, None])
    elif SCORE == "sigmoid":
        score = tl.div_rn(tl.full(logit.shape, 1.0, tl.float32), 1.0 + tl.exp(-logit))
    return tl.where(known, score, float("-inf"))


@triton.jit
def _weight(score, key, there, margin, SCORE: tl.constexpr):
    """Return the score of the chosen experts, or their share of the softmax over those that are left and close."""
    weight = tl.sum(tl.where(there, score, 0.0), axis=1)
    if SCORE == "sparsemixer":
        best = weight[:, None] + tl.zeros_like(score)
        far = tl.div_rn(best - score, tl.maximum(tl.abs(score), best)) > margin
        e = tl.where((key > float("-inf")) & (far == 0), tl.exp(score - best), 0.0)
        weight = tl.div_rn(tl.full(weight.shape, 1.0, tl.float32), tl.sum(e, axis=1))
    return weight


@triton.jit
def _within_groups(
    key, column, experts, ROWS: tl.constexpr, GROUPS: tl.constexpr, PADDED: tl.constexpr, TOP: tl.constexpr,
    TWO: tl.constexpr,
):  # fmt: skip
    """Return the keys with -inf for experts outside the best groups."""
    group = column // (experts // GROUPS)
    each = tl.arange(0, PADDED)
    best_of = tl.full([ROWS, PADDED], float("-inf"), tl.float32)
    for number in tl.static_range(GROUPS):
        inside = tl.where((group == number)[None, :], key, float("-inf"))
        worth = tl.max(inside, axis=1)
        if TWO:
            _, first = _best(inside, column)
            worth += tl.max(tl.where(first, float("-inf"), inside), axis=1)
        worth = tl.maximum(worth, _LOWEST)
        best_of = tl.where(each[None, :] == number, worth[:, None], best_of)
    allowed = tl.zeros(key.shape, tl.int1)
    for _ in tl.static_range(TOP):
        best, there = _best(best_of, each)
        best_of = tl.where(there, float("-inf"), best_of)
        allowed |= group[None, :] == best[:, None]
    return tl.where(allowed, key, float("-inf"))


@triton.jit
def _weighed(weights, ids, scales, real, SCORE: tl.constexpr, RENORMALISE: tl.constexpr, SCALES: tl.constexpr):
    """Return the weights of the results of experts, of what was found when these were chosen."""
    weights = _scores_of(weights, real, "softmax" if SCORE == "softmax_of_chosen" else "none")
    weights = tl.where(real, weights, 0.0)
    if RENORMALISE:
        weights = tl.div_rn(weights, tl.zeros_like(weights) + (tl.sum(weights, axis=1)[:, None] + 1e-20))
    if SCALES:
        weights *= tl.load(scales + ids, mask=real & (ids >= 0), other=0.0)
    return weights


@triton.jit
def select(
    logit, real, correction, scales, chosen, row, rows, column, experts, scale, margin,
    ROWS: tl.constexpr, EXPERTS: tl.constexpr, K: tl.constexpr, RANKS: tl.constexpr, SCORE: tl.constexpr,
    RENORMALISE: tl.constexpr, CORRECT: tl.constexpr, SCALES: tl.constexpr, GROUPS: tl.constexpr, PADDED: tl.constexpr,
    TOP_GROUPS: tl.constexpr, TWO: tl.constexpr,
):  # fmt: skip
    """Store the experts of rows, and return the rank of each expert among a row's choices, or -1, [ROWS, EXPERTS].

    `logit` is -inf beyond the experts; a row that is not `real` chooses none.
    """
    known = column < experts
    score = _scores_of(logit, known[None, :], SCORE)
    key = score
    if CORRECT:
        key += tl.load(correction + column, mask=known, other=0.0)[None, :]
    key = tl.where(known[None, :], tl.maximum(tl.where(key == key, key, _LOWEST), _LOWEST), float("-inf"))
    if GROUPS > TOP_GROUPS:
        key = _within_groups(key, column, experts, ROWS, GROUPS, PADDED, TOP_GROUPS, TWO)
    rank = tl.arange(0, RANKS)
    ids = tl.zeros([ROWS, RANKS], tl.int32)
    weights = tl.full([ROWS, RANKS], float("-inf"), tl.float32)
    ranks = tl.full([ROWS, EXPERTS], -1, tl.int32)
    for number in tl.static_range(K):
        best, there = _best(key, column)
        weight = _weight(score, key, there, margin, SCORE)
        key = tl.where(there, float("-inf"), key)
        ranks = tl.where(there & real[:, None], number, ranks)
        ids = tl.where(rank[None, :] == number, best[:, None], ids)
        weights = tl.where(rank[None, :] == number, weight[:, None], weights)
    weights = _weighed(weights, ids, scales, (rank < K)[None, :], SCORE, RENORMALISE, SCALES)
    ids = tl.where(real[:, None], ids, -1)
    spot = row.to(tl.int64)[:, None] * K + rank[None, :]
    inside = (row < rows)[:, None] & (rank < K)[None, :]
    tl.store(chosen.ids_NK + spot, ids, mask=inside)
    tl.store(chosen.weights_NK + spot, weights * scale, mask=inside)
    return ranks
