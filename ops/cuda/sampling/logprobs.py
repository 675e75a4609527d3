"""Log-probabilities, ranks and the likeliest tokens from logits on CUDA, in float32; never changes the logits.

Two kernels: each block of a row gives its largest logits in order, and its share of the sum; one program for each row
merges them. A logit and its token id are one 64-bit key, so that equals keep the order of their ids, as on the CPU.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["HEAD", "ListScratch", "logprobs"]

HEAD = 2
"""Words of a position before its likeliest tokens: log-probability as float32, and rank."""

_BLOCK = 4096


class ListScratch:
    """Device memory that `logprobs` uses between its kernels.

    Args:
        rows: Most positions of a call.
        vocabulary: Number of logits at each position.
        places: Most likeliest tokens that are wanted at any position.
        device: The GPU.
    """

    def __init__(self, rows: int, vocabulary: int, places: int, device: torch.device | str) -> None:
        parts = triton.cdiv(vocabulary, _BLOCK)
        self.best_BSK = torch.empty(rows, parts, min(places, _BLOCK), dtype=torch.int64, device=device)
        self.maxima_BS = torch.empty(rows, parts, dtype=torch.float32, device=device)
        self.sums_BS = torch.empty(rows, parts, dtype=torch.float32, device=device)
        self.above_BS = torch.empty(rows, parts, dtype=torch.int32, device=device)


# fmt: off
@triton.jit
def _list_kernel(
    logits, rows, wants, tokens, best, maxima, sums, above, stride, size, parts, places,
    BLOCK: tl.constexpr, PDL: tl.constexpr,
):
    """Find a block's largest keys in falling order, its largest logit, its sum, and how many exceed the row's token."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    at_row = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    wanted = tl.load(wants + tl.load(rows + at_row).to(tl.int64))
    if wanted > 0:
        at = part * BLOCK + tl.arange(0, BLOCK)
        inside = at < size
        line = logits + at_row * stride
        value = tl.load(line + at, mask=inside, other=float("-inf")).to(tl.float32)
        value = tl.where(value == 0.0, 0.0, value)  # both zeros are equal
        token = tl.maximum(tl.load(tokens + at_row), 0)
        there = tl.load(line + token).to(tl.float32)
        most = tl.max(value, axis=0)
        weight = tl.exp(value - tl.where(most == float("-inf"), 0.0, most))
        place = at_row * parts + part
        tl.store(maxima + place, most)
        tl.store(sums + place, tl.sum(weight, axis=0))
        tl.store(above + place, tl.sum((value > there).to(tl.int32), axis=0))
        bits = value.to(tl.int32, bitcast=True)
        ordered = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits).to(tl.int64)
        key = tl.where(inside, (ordered << 32) | (0x7FFFFFFF - at).to(tl.int64), -9223372036854775807)
        for step in range(0, tl.minimum(wanted - 1, places)):
            first = tl.max(key, axis=0)
            tl.store(best + place * places + step, first)
            key = tl.where(key == first, -9223372036854775807, key)


@triton.jit
def _merge_kernel(
    logits, rows, wants, tokens, best, maxima, sums, above, out, values, stride, parts, places, width,
    PARTS: tl.constexpr, HEAD: tl.constexpr, PDL: tl.constexpr,
):
    """Write a position's line: log-probability, rank, ids of the likeliest tokens, and their log-probabilities."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    at_row = tl.program_id(0).to(tl.int64)
    wanted = tl.load(wants + tl.load(rows + at_row).to(tl.int64))
    if wanted > 0:
        part = tl.arange(0, PARTS)
        inside = part < parts
        place = at_row * parts + part
        highs = tl.load(maxima + place, mask=inside, other=float("-inf"))
        most = tl.max(highs, axis=0)
        total = tl.sum(tl.load(sums + place, mask=inside, other=0.0) * tl.exp(highs - most), axis=0)
        normaliser = most + tl.log(total)
        token = tl.maximum(tl.load(tokens + at_row), 0)
        there = tl.load(logits + at_row * stride + token).to(tl.float32)
        line = at_row * (HEAD + 2 * width)
        tl.store(values + line, there - normaliser)
        tl.store(out + line + 1, 1 + tl.sum(tl.load(above + place, mask=inside, other=0), axis=0))
        taken = tl.zeros([PARTS], tl.int32)
        head = tl.load(best + place * places, mask=inside & (wanted > 1), other=-9223372036854775807)
        for step in range(0, wanted - 1):
            first = tl.max(head, axis=0)
            ordered = (first >> 32).to(tl.int32)
            bits = tl.where(ordered < 0, ordered ^ 0x7FFFFFFF, ordered)
            tl.store(out + line + HEAD + step, 0x7FFFFFFF - (first & 0xFFFFFFFF).to(tl.int32))
            tl.store(values + line + HEAD + width + step, bits.to(tl.float32, bitcast=True) - normaliser)
            won = head == first
            taken += won.to(tl.int32)
            more = won & (taken < tl.minimum(wanted - 1, places))
            following = tl.load(best + place * places + taken, mask=more, other=-9223372036854775807)
            head = tl.where(won, following, head)


# fmt: on
def logprobs(
    logits_BV: Tensor,
    rows_B: Tensor,
    wants_R: Tensor,
    tokens_B: Tensor,
    out_BW: Tensor,
    scratch: ListScratch,
    *,
    pdl: bool = False,
) -> None:
    """Write a line for each position whose row wants one; for logits that are not finite, it means nothing.

    Args:
        logits_BV: Logits, bf16, fp16 or fp32, last dimension contiguous.
        rows_B: Row numbers, int32 or int64.
        wants_R: Line that each row wants, int32: 0 for none, else 1 + the number of likeliest tokens.
        tokens_B: Token at each position, int32; below 0 for any.
        out_BW: int32 [B, HEAD + 2 * width], contiguous: log-probability (float32), rank, ids of the `width` likeliest
            tokens in falling order, lower ids first among equals, and their log-probabilities (float32); what is not
            wanted stays as it was. No row may want more than `width`.
        scratch: Scratch for at least this many positions, this vocabulary and `width` places.
        pdl: Whether to use programmatic dependent launch.
    """
    count, size = logits_BV.shape
    parts, places = scratch.best_BSK.shape[1:]
    # fmt: off
    _list_kernel[(count, parts)](
        logits_BV, rows_B, wants_R, tokens_B, scratch.best_BSK, scratch.maxima_BS, scratch.sums_BS, scratch.above_BS,
        logits_BV.stride(0), size, parts, places,
        BLOCK=_BLOCK, PDL=pdl, num_warps=8, launch_pdl=pdl,
    )
    _merge_kernel[(count,)](
        logits_BV, rows_B, wants_R, tokens_B, scratch.best_BSK, scratch.maxima_BS, scratch.sums_BS, scratch.above_BS,
        out_BW, out_BW.view(torch.float32), logits_BV.stride(0), parts, places, (out_BW.shape[1] - HEAD) // 2,
        PARTS=triton.next_power_of_2(parts), HEAD=HEAD, PDL=pdl, num_warps=1, launch_pdl=pdl,
    )
    # fmt: on
