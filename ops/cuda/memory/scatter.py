"""Writes words to scattered places on CUDA, and sends ids back to the host; knows nothing of what they mean.

Words come as `[count, place, word, place, word, ...]`, all int32, so that one copy sends all. A graph reads them from
pinned memory, and writes ids there, in a line for each replay.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["Batch", "ExchangeLines", "apply_words", "leave_ids", "scatter_words"]

_BLOCK = 1024


class ExchangeLines(NamedTuple):
    """Lines of pinned memory that replays use in turn, as host and device both count; the last line is spare."""

    turn_2: Tensor
    """Line of the next replay, and line of the latest, int32 [2]."""
    words_TW: Tensor
    """Words for each replay, pinned int32."""
    ids_TB: Tensor
    """Ids from each replay, pinned int32."""


class Batch(NamedTuple):
    """Rows of a batch, and whether each takes part."""

    rows_B: Tensor
    """Row numbers of the batch, int32."""
    stopped_R: Tensor
    """Flag of each row, int32: not 0 for rows that no longer take part."""
    active_B: Tensor
    """Output, int32: the rows of the batch, with `padding` in place of those that do not take part."""
    padding: int


# fmt: off
@triton.jit
def _apply_kernel(
    target, words, turn, batch, stopped, active, size, padding, stride, turns,
    BLOCK: tl.constexpr, ROWS: tl.constexpr,
):
    number = tl.load(turn)
    line = words + number * stride
    count = tl.load(line)
    for start in range(0, count, BLOCK):
        at = start + tl.arange(0, BLOCK)
        inside = at < count
        place = tl.load(line + 1 + 2 * at, mask=inside, other=0)
        tl.store(target + place, tl.load(line + 2 + 2 * at, mask=inside, other=0), mask=inside)
    tl.debug_barrier()
    tl.store(turn, (number + 1) % turns)
    tl.store(turn + 1, number)
    if ROWS > 0:
        at = tl.arange(0, ROWS)
        row = tl.load(batch + at, mask=at < size, other=0)
        gone = tl.load(stopped + row, mask=at < size, other=0)
        tl.store(active + at, tl.where(gone != 0, padding, row), mask=at < size)


# fmt: on
@triton.jit
def _leave_kernel(ids, lines, turn, size, stride, ROWS: tl.constexpr, PDL: tl.constexpr):
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    at = tl.arange(0, ROWS)
    line = lines + tl.load(turn + 1) * stride
    tl.store(line + at, tl.load(ids + at, mask=at < size, other=0), mask=at < size)


@triton.jit(do_not_specialize=["count"])
def _scatter_kernel(target, staged, count, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < count
    place = tl.load(staged + 1 + 2 * at, mask=inside, other=0)
    tl.store(target + place, tl.load(staged + 2 + 2 * at, mask=inside, other=0), mask=inside)


def apply_words(target: Tensor, turns: ExchangeLines, batch: Batch | None = None) -> None:
    """Compute `target[place] = word` for all pairs of the next line, and advance to the line after it.

    One program does all, so this is for graphs and few pairs.

    Args:
        target: int32 tensor of one dimension.
        turns: The lines with the pairs; no place may come twice in a line.
        batch: The batch whose active rows are found afterwards; None for no batch.
    """
    size = 0 if batch is None else len(batch.rows_B)
    rows, stopped, active, padding = (target, target, target, 0) if batch is None else batch
    most = triton.next_power_of_2(size) if size else 0
    lines, stride = turns.words_TW.shape
    _apply_kernel[(1,)](
        target, turns.words_TW, turns.turn_2, rows, stopped, active, size, padding, stride, lines - 1,
        BLOCK=_BLOCK, ROWS=most, num_warps=8,
    )  # fmt: skip


def leave_ids(ids_B: Tensor, turns: ExchangeLines, *, pdl: bool = False) -> None:
    """Write int32 `ids_B` to the line of the latest replay; for a graph that began with `apply_words`.

    Args:
        ids_B: Ids for the first places of the line, which may be longer.
        turns: The lines for ids.
        pdl: Whether to use programmatic dependent launch.
    """
    _leave_kernel[(1,)](
        ids_B, turns.ids_TB, turns.turn_2, len(ids_B), turns.ids_TB.stride(0),
        ROWS=triton.next_power_of_2(len(ids_B)), PDL=pdl, num_warps=4, launch_pdl=pdl,
    )  # fmt: skip


def scatter_words(target: Tensor, staged: Tensor, count: int) -> None:
    """Compute `target[place] = word` for the `count` pairs of `staged`, of which there may be many."""
    _scatter_kernel[(triton.cdiv(count, _BLOCK),)](target, staged, count, BLOCK=_BLOCK, num_warps=4)
