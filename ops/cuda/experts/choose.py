"""`choose`: the experts of each token on CUDA (Triton) and, for products in tiles, which tokens each expert has.

Computes what `route` of ops/experts.py specifies, from logits. Lists are made on the device, in a fixed number of
launches whatever is chosen, so that graphs can hold them: programs choose for a chunk of tokens each and count those of
each expert; the last of them to finish lays out the experts' lists, one behind another, and cuts them into tiles; and
a second launch fills the lists. Where one program is enough, it does all of that. The order within a list is that of
the tokens, so that results do not vary from run to run. A pair is a token and one of its experts, numbered token * K +
rank; a place is a position in all lists together. N tokens, X experts, K chosen experts of a token, S divisions of the
inputs (logits.py).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

if TYPE_CHECKING:
    from torch import Tensor

    from headrace.ops.cuda.experts.registry import Padding
    from headrace.ops.routing import Routing

__all__ = ["Choices", "Lists", "allocate_choices", "allocate_lists", "choose", "most_tiles"]

_LISTED: Final = 512
"""Most tokens for which programs that make lists have few: weights may round differently where there are more."""
_CHUNKS: Final = (4, 16, 64)
"""Tokens of a program: without lists, with lists, and with more than `_LISTED` tokens in them."""
_WARPS: Final = {4: 4, 16: 4, 64: 8}
"""Warps of a program, by its tokens."""
_BLOCK: Final = 32
"""Chunks whose counts are read at once."""
_STEP: Final = tl.constexpr(32)
"""Rows, some of which a tile of more is cut to: what csrc/expert_dense.cu multiplies at once."""
_LOWEST: Final = tl.constexpr(-3.0e38)
"""Stands for a score that is no number, so that an expert is chosen all the same."""


class Choices(NamedTuple):
    """The experts of each token, the best first."""

    ids_NK: Tensor
    """Numbers of the experts, int32; -1 for a token that is padding."""
    weights_NK: Tensor
    """Weights of their results, float32."""


class Lists(NamedTuple):
    """The tokens of each expert, cut into tiles."""

    pairs_P: Tensor
    """Pairs, int32, those of each expert one behind another, in the order of their tokens."""
    tiles_T3: Tensor
    """By tile its expert, its first place, and how many places it has, int32."""
    ends_2: Tensor
    """Number of tiles, and of programs that have finished, which is 0 between launches, int32."""
    counts_CX: Tensor
    """Tokens of each expert by chunk; then the place of the first of them, int32."""
    rows: int
    """Most places of a tile."""


def most_tiles(pairs: int, experts: int, rows: int) -> int:
    """Return the most tiles of `rows` places that any choice of `pairs` pairs makes."""
    hit = min(pairs, experts)
    return (pairs + hit * (rows - 1)) // rows


def allocate_choices(rows: int, routing: Routing, device: torch.device) -> Choices:
    """Return memory for the choices of `rows` tokens."""
    shape = (rows, routing.top_k)
    return Choices(
        torch.empty(shape, dtype=torch.int32, device=device), torch.empty(shape, dtype=torch.float32, device=device)
    )


def allocate_lists(tokens: int, routing: Routing, rows: int, finished: Tensor) -> Lists:
    """Return memory for the lists of `tokens` tokens, in tiles of `rows` places.

    Args:
        tokens: Number of tokens.
        routing: How experts are chosen.
        rows: Most places of a tile.
        finished: Zeros, int32 [2], which launches leave as they found them but for the first.
    """
    pairs, device = tokens * routing.top_k, finished.device

    def words(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.int32, device=device)

    tiles = words(most_tiles(pairs, routing.experts, rows), 3)
    chunks = triton.cdiv(tokens, _chunk(tokens, has_lists=True))
    return Lists(words(pairs), tiles, finished, words(chunks, routing.experts), rows)


def _chunk(tokens: int, *, has_lists: bool) -> int:
    """Return the tokens for which a program chooses."""
    few, some, many = _CHUNKS
    return few if not has_lists else some if tokens <= _LISTED else many


@triton.jit
def _best(key, column):
    """Return the number of the largest key of each row, the lowest of equal ones, and where it is."""
    best = tl.argmax(key, axis=1, tie_break_left=True)
    return best, column[None, :] == best[:, None]


@triton.jit
def _logits_of(logits, row, rows, column, experts, DIVISIONS: tl.constexpr):
    """Return the logits of rows, 0 beyond the last, and what lies beyond the experts as -inf."""
    inside = (row < rows)[:, None] & (column < experts)[None, :]
    spot = logits + row.to(tl.int64)[:, None] * experts + column[None, :]
    logit = tl.load(spot, mask=inside, other=float("-inf"))
    for division in tl.static_range(1, DIVISIONS):
        logit += tl.load(spot + division * rows.to(tl.int64) * experts, mask=inside, other=0.0)
    return tl.where((row < rows)[:, None], logit, 0.0)


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
def _exclusive(counts):
    return tl.cumsum(counts, axis=0) - counts


@triton.jit
def _fill(pairs, first, ranks, row, K: tl.constexpr):
    """Write the pairs of a chunk to their places; `ranks` are those of experts [rows, experts], or -1."""
    taken = ranks >= 0
    place = first[None, :] + _exclusive(taken.to(tl.int32))
    tl.store(pairs + place, row[:, None] * K + ranks, mask=taken)


@triton.jit
def _cut(lists, column, begin, total, tile_rows):
    """Cut the lists of experts, which begin at places and have `total` pairs, into as few tiles as hold them.

    Those of an expert are as large as each other, but for the last, and multiples of `_STEP` where tiles are larger.
    """
    tiles = (total + tile_rows - 1) // tile_rows
    each = (total + tl.maximum(tiles, 1) - 1) // tl.maximum(tiles, 1)
    each = tl.minimum((each + _STEP - 1) // _STEP * _STEP, tile_rows)
    tile = lists.tiles_T3 + _exclusive(tiles) * 3
    for number in range(tl.max(tiles, axis=0)):
        mask = number < tiles
        done = number * each
        tl.store(tile + number * 3, column, mask=mask)
        tl.store(tile + number * 3 + 1, begin + done, mask=mask)
        tl.store(tile + number * 3 + 2, tl.minimum(total - done, each), mask=mask)
    tl.store(lists.ends_2, tl.sum(tiles, axis=0))


@triton.jit
def _lay_out(lists, column, known, chunks, experts, tile_rows, EXPERTS: tl.constexpr, BLOCK: tl.constexpr):
    """Make of counts by chunk the first places, and tiles."""
    total = tl.zeros([EXPERTS], tl.int32)
    for start in range(0, chunks, BLOCK):
        at = start + tl.arange(0, BLOCK)
        inside = (at < chunks)[:, None] & known[None, :]
        spot = lists.counts_CX + at[:, None] * experts + column[None, :]
        total += tl.sum(tl.load(spot, mask=inside, other=0, cache_modifier=".cg"), axis=0)
    begin = _exclusive(total)
    before = begin
    for start in range(0, chunks, BLOCK):
        at = start + tl.arange(0, BLOCK)
        inside = (at < chunks)[:, None] & known[None, :]
        spot = lists.counts_CX + at[:, None] * experts + column[None, :]
        counts = tl.load(spot, mask=inside, other=0, cache_modifier=".cg")
        tl.store(spot, before[None, :] + _exclusive(counts), mask=inside)
        before += tl.sum(counts, axis=0)
    _cut(lists, column, begin, total, tile_rows)


@triton.jit(do_not_specialize=["rows", "chunks", "tile_rows", "padding_row"])
def _choose_experts_kernel(
    logits, correction, scales, row_numbers, chosen, lists, rows, chunks, experts, tile_rows, padding_row, scale,
    margin,
    ROWS: tl.constexpr, EXPERTS: tl.constexpr, K: tl.constexpr, RANKS: tl.constexpr, SCORE: tl.constexpr,
    RENORMALISE: tl.constexpr, CORRECT: tl.constexpr, SCALES: tl.constexpr, GROUPS: tl.constexpr, PADDED: tl.constexpr,
    TOP_GROUPS: tl.constexpr, TWO: tl.constexpr, PADDED_ROWS: tl.constexpr, LISTS: tl.constexpr, BLOCK: tl.constexpr,
    DIVISIONS: tl.constexpr, SINGLE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    chunk = tl.program_id(0)
    row = chunk * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, EXPERTS)
    known = column < experts
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    real = row < rows
    if PADDED_ROWS:
        real &= tl.load(row_numbers + row, mask=real, other=padding_row) != padding_row
    logit = _logits_of(logits, row, rows, column, experts, DIVISIONS)
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
    if LISTS:
        counts = tl.sum((ranks >= 0).to(tl.int32), axis=0)
        if SINGLE:
            begin = _exclusive(counts)
            _cut(lists, column, begin, counts, tile_rows)
            _fill(lists.pairs_P, begin, ranks, row, K)
        else:
            tl.store(lists.counts_CX + chunk * experts + column, counts, mask=known)
            tl.debug_barrier()
            arrived = tl.atomic_add(lists.ends_2 + 1, 1, sem="acq_rel", scope="gpu")
            if arrived == chunks - 1:
                _lay_out(lists, column, known, chunks, experts, tile_rows, EXPERTS, BLOCK)
                tl.store(lists.ends_2 + 1, 0)


@triton.jit(do_not_specialize=["rows"])
def _fill_experts_kernel(
    ids, lists, rows, experts,
    ROWS: tl.constexpr, EXPERTS: tl.constexpr, K: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    chunk = tl.program_id(0)
    row = chunk * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, EXPERTS)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    ranks = tl.full([ROWS, EXPERTS], -1, tl.int32)
    for number in tl.static_range(K):
        each = tl.load(ids + row.to(tl.int64) * K + number, mask=row < rows, other=-1)
        ranks = tl.where(each[:, None] == column[None, :], number, ranks)
    first = tl.load(lists.counts_CX + chunk * experts + column, mask=column < experts, other=0)
    _fill(lists.pairs_P, first, ranks, row, K)


def choose(
    logits_SNX: Tensor,
    routing: Routing,
    correction_X: Tensor | None,
    chosen: Choices,
    lists: Lists | None = None,
    *,
    scales_X: Tensor | None = None,
    padding: Padding | None = None,
    pdl: bool = False,
) -> None:
    """Write the experts of each token, and their lists.

    Args:
        logits_SNX: Sums over divisions of the inputs, whose sum is the router's logits, float32, contiguous.
        routing: How experts are chosen.
        correction_X: Added to the scores for the choice alone, float32, or None.
        chosen: Output of the choices.
        lists: Output of the lists; None for none.
        scales_X: Factors of the weights of each expert's results, float32, or None.
        padding: Tokens that are given no experts; None where there are none.
        pdl: Whether to use programmatic dependent launch.
    """
    divisions, rows, experts = logits_SNX.shape
    size = _chunk(rows, has_lists=lists is not None)
    chunks, padded = triton.cdiv(rows, size), triton.next_power_of_2(experts)
    # What is not used is another tensor, which no kernel reads.
    used = lists or Lists(chosen.ids_NK, chosen.ids_NK, chosen.ids_NK, chosen.ids_NK, 0)
    correction = logits_SNX if correction_X is None else correction_X
    scales = logits_SNX if scales_X is None else scales_X
    _choose_experts_kernel[(chunks,)](
        logits_SNX, correction, scales, chosen.ids_NK if padding is None else padding.rows_N, chosen, used,
        rows, chunks, experts, used.rows, 0 if padding is None else padding.row, routing.scale, routing.margin,
        ROWS=size, EXPERTS=padded, K=routing.top_k, RANKS=triton.next_power_of_2(routing.top_k), SCORE=routing.score,
        RENORMALISE=routing.renormalise, CORRECT=correction_X is not None, SCALES=scales_X is not None,
        GROUPS=routing.groups,
        PADDED=triton.next_power_of_2(routing.groups), TOP_GROUPS=routing.top_groups,
        TWO=routing.group_score == "top2", PADDED_ROWS=padding is not None, LISTS=lists is not None,
        BLOCK=_BLOCK, DIVISIONS=divisions, SINGLE=chunks == 1, PDL=pdl,
        num_warps=_WARPS[size], launch_pdl=pdl,
    )  # fmt: skip
    if lists is not None and chunks > 1:
        _fill_experts_kernel[(chunks,)](
            chosen.ids_NK, lists, rows, experts, ROWS=size, EXPERTS=padded, K=routing.top_k, PDL=pdl,
            num_warps=_WARPS[size], launch_pdl=pdl,
        )  # fmt: skip
