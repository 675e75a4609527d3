"""Writes words to scattered places on CUDA; knows nothing of what they mean.

Words come as `[count, place, word, place, word, ...]`, all int32, so that what is sent is one contiguous piece.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import triton
import triton.language as tl

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["Batch", "apply_words", "scatter_words"]

_BLOCK = 1024


class Batch(NamedTuple):
    """Which rows a batch names, and which of them take part."""

    rows_B: Tensor
    """int32."""
    stopped_R: Tensor
    """int32: not 0 for rows that take part no more."""
    active_B: Tensor
    """int32: written: the batch, with `padding` in their place."""
    padding: int


@triton.jit
def _apply_kernel(target, staged, batch, stopped, active, size, padding, BLOCK: tl.constexpr, ROWS: tl.constexpr):
    count = tl.load(staged)
    for start in range(0, count, BLOCK):
        at = start + tl.arange(0, BLOCK)
        inside = at < count
        place = tl.load(staged + 1 + 2 * at, mask=inside, other=0)
        tl.store(target + place, tl.load(staged + 2 + 2 * at, mask=inside, other=0), mask=inside)
    tl.debug_barrier()
    tl.store(staged, 0)
    if ROWS > 0:
        at = tl.arange(0, ROWS)
        row = tl.load(batch + at, mask=at < size, other=0)
        gone = tl.load(stopped + row, mask=at < size, other=0)
        tl.store(active + at, tl.where(gone != 0, padding, row), mask=at < size)


@triton.jit(do_not_specialize=["count"])
def _scatter_kernel(target, staged, count, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < count
    place = tl.load(staged + 1 + 2 * at, mask=inside, other=0)
    tl.store(target + place, tl.load(staged + 2 + 2 * at, mask=inside, other=0), mask=inside)


def apply_words(target: Tensor, staged: Tensor, batch: Batch | None = None) -> None:
    """`target[place] = word` for the pairs staged, however many the device finds there, and none the next time.

    For a graph, and few pairs: one program does it.

    Args:
        target: int32, one dimension.
        staged: int32 [count, place, word, ...]; no place may come twice. Its count becomes 0.
        batch: Whose active rows to find, after that.
    """
    size = 0 if batch is None else len(batch.rows_B)
    rows, stopped, active, padding = (target, target, target, 0) if batch is None else batch
    most = triton.next_power_of_2(size) if size else 0
    _apply_kernel[(1,)](target, staged, rows, stopped, active, size, padding, BLOCK=_BLOCK, ROWS=most, num_warps=8)


def scatter_words(target: Tensor, staged: Tensor, count: int) -> None:
    """The same for `count` pairs, known to the host and as many as it likes; `staged` stays as it is."""
    _scatter_kernel[(triton.cdiv(count, _BLOCK),)](target, staged, count, BLOCK=_BLOCK, num_warps=4)
