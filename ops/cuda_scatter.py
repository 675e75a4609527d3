"""Writes words to scattered places on CUDA; knows nothing of what they mean."""

from __future__ import annotations

from typing import TYPE_CHECKING

import triton
import triton.language as tl

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["scatter_words"]

_BLOCK = 1024


@triton.jit(do_not_specialize=["count"])
def _scatter_kernel(target, staged, count, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < count
    place = tl.load(staged + at, mask=inside, other=0)
    tl.store(target + place, tl.load(staged + count + at, mask=inside, other=0), mask=inside)


def scatter_words(target: Tensor, staged: Tensor, count: int) -> None:
    """`target[staged[i]] = staged[count + i]` for i below `count`; no place may come twice.

    Args:
        target: int32, one dimension.
        staged: int32: `count` places, then as many words.
        count: How many.
    """
    _scatter_kernel[(triton.cdiv(count, _BLOCK),)](target, staged, count, BLOCK=_BLOCK, num_warps=4)
