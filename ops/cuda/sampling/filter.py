"""Top-k, top-p and min-p on CUDA as one threshold on a row's logits; never samples a token.

A row's filters let through exactly the logits from some value on, which four kernels find: the largest logit and the
weight of every sub-block; a floor under which nothing can pass; a copy of the few logits above it; a search among them.
Counts and fixed-point weights are exact, so the result depends neither on the batch nor on the order of the copy.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["FilterScratch", "find_least"]

_BLOCK = 4096
_SUB_BLOCK = 512
_SEARCH_BLOCK = 8192
# Candidates kept for a row; a row with more is searched through its logits. Up to _SOME are searched in registers.
_CANDIDATES = 65536
_FEW, _SOME = 2048, 16384


class FilterScratch:
    """Device memory that `find_least` uses between its kernels."""

    def __init__(self, rows: int, vocabulary: int, device: torch.device | str, dtype: torch.dtype) -> None:
        subs = triton.cdiv(vocabulary, _BLOCK) * (_BLOCK // _SUB_BLOCK)
        self.maxima_BU = torch.empty(rows, subs, dtype=torch.float32, device=device)
        self.sums_BU = torch.empty(rows, subs, dtype=torch.float32, device=device)
        self.bounds_B4 = torch.empty(rows, 4, dtype=torch.float32, device=device)
        self.counts_B = torch.empty(rows, dtype=torch.int32, device=device)
        self.candidates_BM = torch.empty(rows, _CANDIDATES, dtype=dtype, device=device)


@triton.jit
def _order(value, SHIFT: tl.constexpr):
    """Return integers in the order of the floats that they stand for, with the lowest SHIFT bits zero."""
    bits = value.to(tl.float32).to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits) >> SHIFT


@triton.jit
def _unorder(key, SHIFT: tl.constexpr):
    negative = ((key << SHIFT) | ((1 << SHIFT) - 1)) ^ 0x7FFFFFFF
    return tl.where(key < 0, negative, key << SHIFT).to(tl.float32, bitcast=True)


@triton.jit
def _asks(rows, temperature, top_k, top_p, min_p, size):
    """Return the options of this program's row: (temperature, k, p, min-p, wants k, wants p)."""
    row = tl.load(rows + tl.program_id(0)).to(tl.int64)
    heat = tl.load(temperature + row)
    most = tl.load(top_k + row)
    share = tl.load(top_p + row)
    smallest = tl.load(min_p + row)
    return heat, most, share, smallest, (heat > 0.0) & (most > 0) & (most < size), (heat > 0.0) & (share < 1.0)


@triton.jit
def _survey_kernel(
    logits,
    rows,
    temperature,
    top_k,
    top_p,
    min_p,
    maxima,
    sums,
    counts,
    stride,
    size,
    subs,
    SUBS: tl.constexpr,
    SUB: tl.constexpr,
    PDL: tl.constexpr,
):
    """Find the largest logit of each sub-block, and the sum of exp((x - largest) / temperature)."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    heat, most, share, smallest, wants_k, wants_p = _asks(rows, temperature, top_k, top_p, min_p, size)
    if wants_k | wants_p | ((heat > 0.0) & (smallest > 0.0)):
        at_row = tl.program_id(0)
        sub = tl.program_id(1) * SUBS + tl.arange(0, SUBS)
        at = sub[:, None] * SUB + tl.arange(0, SUB)[None, :]
        line = logits + at_row.to(tl.int64) * stride
        value = tl.load(line + at, mask=at < size, other=float("-inf")).to(tl.float32)
        top = tl.max(value, axis=1)
        weight = tl.exp((value - tl.where(top == float("-inf"), 0.0, top)[:, None]) / tl.maximum(heat, 1e-6))
        tl.store(maxima + at_row * subs + sub, top)
        tl.store(sums + at_row * subs + sub, tl.sum(weight, axis=1))
        if tl.program_id(1) == 0:
            tl.store(counts + at_row, 0)


@triton.jit
def _bounds_kernel(
    rows,
    temperature,
    top_k,
    top_p,
    min_p,
    maxima,
    sums,
    bounds,
    least,
    size,
    subs,
    SUBS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Find a floor below which no token can pass: (floor, largest logit, sum of weights, whether to search)."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    at_row = tl.program_id(0)
    heat, most, share, smallest, wants_k, wants_p = _asks(rows, temperature, top_k, top_p, min_p, size)
    searching = wants_k | wants_p
    floor = float("-inf")
    top = 0.0
    total = 0.0
    bound = float("-inf")
    if searching | ((heat > 0.0) & (smallest > 0.0)):
        heat = tl.maximum(heat, 1e-6)
        at = tl.arange(0, SUBS)
        highs = tl.load(maxima + at_row * subs + at, mask=at < subs, other=float("-inf"))
        masses = tl.load(sums + at_row * subs + at, mask=at < subs, other=0.0)
        top = tl.max(highs, axis=0)
        total = tl.sum(masses * tl.exp((highs - top) / heat), axis=0)
        if smallest > 0.0:
            bound = tl.minimum(top + heat * tl.log(smallest), top)
        if wants_k:
            # The k-th largest of the sub-blocks' maxima: at least k logits reach it.
            keys = _order(highs, 0)
            if most <= tl.sum((highs > float("-inf")).to(tl.int32), axis=0):
                above = _order(top, 0).to(tl.int64) + 1
                below = tl.min(tl.where(highs > float("-inf"), keys, 2147483647), axis=0).to(tl.int64)
                while above - below > 1:
                    middle = (above + below) >> 1
                    if tl.sum((keys >= middle).to(tl.int32), axis=0) >= most:
                        below = middle
                    else:
                        above = middle
                floor = _unorder(below.to(tl.int32), 0)
        elif wants_p:
            # What lies under the floor weighs less than the share to leave out, even if it were the whole vocabulary.
            margin = tl.log(size / (tl.maximum(1.0 - share, 1e-6) * total)) + 0.01
            floor = top - heat * tl.maximum(margin, 0.0)
    tl.store(bounds + at_row * 4, floor)
    tl.store(bounds + at_row * 4 + 1, top)
    tl.store(bounds + at_row * 4 + 2, total)
    tl.store(bounds + at_row * 4 + 3, tl.where(searching, 1.0, 0.0))
    tl.store(least + at_row, bound)


@triton.jit
def _gather_kernel(
    logits,
    maxima,
    bounds,
    counts,
    candidates,
    stride,
    size,
    subs,
    SUBS: tl.constexpr,
    SUB: tl.constexpr,
    CANDIDATES: tl.constexpr,
    PDL: tl.constexpr,
):
    """Copy the logits that reach the floor, in any order: the later kernels are exact whatever the order."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    at_row = tl.program_id(0)
    floor = tl.load(bounds + at_row * 4)
    if tl.load(bounds + at_row * 4 + 3) > 0.0:
        highs = tl.load(maxima + at_row * subs + tl.program_id(1) * SUBS + tl.arange(0, SUBS))
        if tl.max(highs, axis=0) >= floor:
            at = tl.program_id(1) * SUBS * SUB + tl.arange(0, SUBS * SUB)
            line = logits + at_row.to(tl.int64) * stride
            value = tl.load(line + at, mask=at < size, other=float("-inf")).to(tl.float32)
            found = (value >= floor) & (value > float("-inf"))
            rank = tl.cumsum(found.to(tl.int32), axis=0)
            start = tl.atomic_add(counts + at_row, tl.sum(found.to(tl.int32), axis=0))
            place = start + rank - 1
            tl.store(candidates + at_row.to(tl.int64) * CANDIDATES + place, value, mask=found & (place < CANDIDATES))


@triton.jit
def _weigh(value, top, inverse):
    """Return exp((x - top) / temperature) in fixed point, so that sums do not depend on their order."""
    return (tl.exp((value - top) * inverse) * 1099511627776.0).to(tl.int64)


@triton.jit
def _narrow(
    kept,
    found,
    top,
    total,
    most,
    share,
    inverse,
    wants_k,
    wants_p,
    CANDIDATES: tl.constexpr,
    SHIFT: tl.constexpr,
):
    """Return the key of the smallest candidate that passes; each search holds a key that passes and one that fails."""
    at = tl.arange(0, CANDIDATES)
    value = tl.load(kept + at, mask=at < found, other=float("-inf")).to(tl.float32)
    keys = _order(value, SHIFT).to(tl.int64)
    bottom = tl.min(tl.where(at < found, keys, 9223372036854775807), axis=0)
    if wants_k:
        above = _order(top, SHIFT).to(tl.int64) + 1
        below = bottom
        while above - below > 1:
            middle = (above + below) >> 1
            if tl.sum((keys >= middle).to(tl.int32), axis=0) >= most:
                below = middle
            else:
                above = middle
        bottom = below
    if wants_p:
        weight = _weigh(value, top, inverse)
        whole = (total * 1099511627776.0).to(tl.int64)
        if wants_k:
            whole = tl.sum(tl.where(keys >= bottom, weight, 0), axis=0)
        target = (whole.to(tl.float64) * share).to(tl.int64)
        above = _order(top, SHIFT).to(tl.int64) + 1
        below = bottom
        while above - below > 1:
            middle = (above + below) >> 1
            if tl.sum(tl.where(keys >= middle, weight, 0), axis=0) >= target:
                below = middle
            else:
                above = middle
        bottom = below
    return bottom.to(tl.int32)


@triton.jit
def _above(line, size, pivot, top, inverse, BLOCK: tl.constexpr, SHIFT: tl.constexpr):
    """Return how many logits of a whole row have a key of at least `pivot`, and their weight."""
    count = tl.zeros([BLOCK], tl.int32)
    mass = tl.zeros([BLOCK], tl.int64)
    for start in range(0, size, BLOCK):
        at = start + tl.arange(0, BLOCK)
        value = tl.load(line + at, mask=at < size, other=float("-inf")).to(tl.float32)
        over = (_order(value, SHIFT) >= pivot) & (value > float("-inf"))
        count += over.to(tl.int32)
        mass += tl.where(over, _weigh(value, top, inverse), 0)
    return tl.sum(count, axis=0), tl.sum(mass, axis=0)


@triton.jit
def _narrow_all(
    line, size, top, floor, total, most, share, inverse, wants_k, wants_p, BLOCK: tl.constexpr, SHIFT: tl.constexpr
):
    """Do what `_narrow` does, over any number of logits, in memory."""
    bottom = _order(tl.maximum(floor, -3.4e38), SHIFT)
    if wants_k:
        above = _order(top, SHIFT).to(tl.int64) + 1
        below = bottom.to(tl.int64)
        while above - below > 1:
            middle = (above + below) >> 1
            count, _ = _above(line, size, middle, top, inverse, BLOCK, SHIFT)
            if count >= most:
                below = middle
            else:
                above = middle
        bottom = below.to(tl.int32)
    if wants_p:
        whole = (total * 1099511627776.0).to(tl.int64)
        if wants_k:
            _, whole = _above(line, size, bottom, top, inverse, BLOCK, SHIFT)
        target = (whole.to(tl.float64) * share).to(tl.int64)
        above = _order(top, SHIFT).to(tl.int64) + 1
        below = bottom.to(tl.int64)
        while above - below > 1:
            middle = (above + below) >> 1
            _, mass = _above(line, size, middle, top, inverse, BLOCK, SHIFT)
            if mass >= target:
                below = middle
            else:
                above = middle
        bottom = below.to(tl.int32)
    return bottom


@triton.jit
def _search_kernel(
    logits,
    rows,
    temperature,
    top_k,
    top_p,
    min_p,
    bounds,
    counts,
    candidates,
    least,
    stride,
    size,
    CANDIDATES: tl.constexpr,
    FEW: tl.constexpr,
    SOME: tl.constexpr,
    BLOCK: tl.constexpr,
    SHIFT: tl.constexpr,
    PDL: tl.constexpr,
):
    """Find the least logit that passes top-k, then top-p of what top-k leaves, and min-p."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    at_row = tl.program_id(0)
    heat, most, share, smallest, wants_k, wants_p = _asks(rows, temperature, top_k, top_p, min_p, size)
    if wants_k | wants_p:
        floor = tl.load(bounds + at_row * 4)
        top = tl.load(bounds + at_row * 4 + 1)
        total = tl.load(bounds + at_row * 4 + 2)
        found = tl.load(counts + at_row)
        kept = candidates + at_row.to(tl.int64) * CANDIDATES
        inverse = 1.0 / tl.maximum(heat, 1e-6)
        if (found == 0) | (tl.abs(top) == float("inf")):
            bound = float("-inf")  # NaN or infinite logits: the scores kernel reports the row
        else:
            if found <= FEW:
                key = _narrow(kept, found, top, total, most, share, inverse, wants_k, wants_p, FEW, SHIFT)
            elif found <= SOME:
                key = _narrow(kept, found, top, total, most, share, inverse, wants_k, wants_p, SOME, SHIFT)
            else:
                source = logits + at_row.to(tl.int64) * stride
                many = size
                if found <= CANDIDATES:
                    source = kept
                    many = found
                key = _narrow_all(source, many, top, floor, total, most, share, inverse, wants_k, wants_p, BLOCK, SHIFT)
            bound = tl.minimum(_unorder(key, SHIFT), top)
        tl.store(least + at_row, tl.maximum(bound, tl.load(least + at_row)))


def find_least(
    logits_BV: Tensor, asks: tuple[Tensor, ...], scratch: FilterScratch, least_B: Tensor, *, pdl: bool = False
) -> None:
    """Write to `least_B` (float32) the least logit that each row's filters let through, -inf for all.

    `asks` are rows_B, temperature_R, top_k_R, top_p_R and min_p_R as in sample.py's `sample`.
    """
    rows, size = logits_BV.shape
    parts, per_part = triton.cdiv(size, _BLOCK), _BLOCK // _SUB_BLOCK
    subs, stride = parts * per_part, logits_BV.stride(0)
    shift = {torch.bfloat16: 16, torch.float16: 13}.get(logits_BV.dtype, 0)
    maxima, sums, bounds, counts = scratch.maxima_BU, scratch.sums_BU, scratch.bounds_B4, scratch.counts_B
    # fmt: off
    _survey_kernel[(rows, parts)](
        logits_BV, *asks, maxima, sums, counts, stride, size, subs,
        SUBS=per_part, SUB=_SUB_BLOCK, PDL=pdl, num_warps=4, launch_pdl=pdl,
    )
    _bounds_kernel[(rows,)](
        *asks, maxima, sums, bounds, least_B, size, subs,
        SUBS=triton.next_power_of_2(subs), PDL=pdl, num_warps=2, launch_pdl=pdl,
    )
    _gather_kernel[(rows, parts)](
        logits_BV, maxima, bounds, counts, scratch.candidates_BM, stride, size, subs,
        SUBS=per_part, SUB=_SUB_BLOCK, CANDIDATES=_CANDIDATES, PDL=pdl, num_warps=4, launch_pdl=pdl,
    )
    _search_kernel[(rows,)](
        logits_BV, *asks, bounds, counts, scratch.candidates_BM, least_B, stride, size,
        CANDIDATES=_CANDIDATES, FEW=_FEW, SOME=_SOME, BLOCK=_SEARCH_BLOCK, SHIFT=shift, PDL=pdl,
        num_warps=16, launch_pdl=pdl,
    )
    # fmt: on
