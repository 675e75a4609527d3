"""Which tokens of a step wear which low-rank adapter, as the CUDA kernels read it; never loads an adapter.

Everything lies on the device, so that a captured step serves any mix of adapters and ranks: the blocks of all adapters
in one arena, a table of where each matrix is, and entries of tokens that share an adapter. Blocks are as
adapters/layout.py lays them out. A site is one product of a layer; its M modules (q, k and v of one product) share x
and have ranks and columns of their own. N tokens, E entries, R the largest rank. Next to read: shrink.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch
import triton
import triton.language as tl

if TYPE_CHECKING:
    from torch import Tensor

__all__ = [
    "ALIKE",
    "GROUP",
    "SEGMENT",
    "UNIT",
    "LoraBatch",
    "LoraSite",
    "UpdateTiling",
    "WornSite",
    "group_rows",
    "module_of",
    "pick",
]

UNIT = 8
"""Elements that a table's offsets count in."""
GROUP = 32
"""Rows of one entry of a decode step."""
ALIKE = 256
"""Rows of one entry where all that wear an adapter wear the same."""
SEGMENT = 64
"""Tokens of one entry of a prefill."""


class UpdateTiling(NamedTuple):
    """How one launch is divided."""

    rank: int
    """Rows of A, or of B transposed, in a tile."""
    block: int
    """Features in a tile."""
    warps: int
    steps: int = 1
    """Tiles, one after another, of a program."""


class LoraSite(NamedTuple):
    """One product of one layer."""

    line: int
    """Of its first module in the table."""
    size_in: int
    sizes_out: tuple[int, ...]
    """Of each module."""


@dataclass(frozen=True, slots=True, eq=False)
class LoraBatch:
    """Which tokens use which adapter; everything is read from the device when a graph replays."""

    arena: Tensor
    """bf16 or fp16: the blocks of all adapters."""
    table: Tensor
    """int32 [slots, modules, 4]: where A and B of a module begin in the arena, in `UNIT`s, its rank, 0 where the
    adapter has none, and the ranks of its site's modules before it."""
    entries_E4: Tensor
    """int32: (slot or -1, first place in `order_N`, tokens, the first token) of up to `rows` tokens of one adapter or
    of none; every token belongs to one entry. Those with a slot come first; spare ones have no token."""
    counts: Tensor
    """int32: entries with a slot, and all that have tokens; where `rows` is 1 nobody reads them."""
    order_N: Tensor
    """int32: token numbers, those of one entry side by side."""
    slots_N: Tensor
    """int32: each token's slot or -1."""
    rows: int
    """Tokens of an entry at most: 1, `GROUP`, `ALIKE` or `SEGMENT`."""
    max_rank: int
    shared_bytes: int
    """The most shared memory that one block may have on the GPU that holds all this."""


class WornSite(NamedTuple):
    """One site's modules of the one adapter that rows of a step wear; `rows` of such a batch is `ALIKE`."""

    arena: Tensor
    own_M4: Tensor
    """int32: the lines of the table, of ranks up to compiling/source.py's `WORN_RANK`; contiguous."""
    slots_N: Tensor
    """int32: each row's slot or -1."""


@triton.jit
def module_of(tile, size_0, size_1, size_2, BLOCK: tl.constexpr, MODULES: tl.constexpr):
    """(module, its size, the features before it, the tile in it) of a tile among those of all modules."""
    place = 0
    before = 0
    size = size_0
    if MODULES > 1 and tile >= tl.cdiv(size_0, BLOCK):
        tile -= tl.cdiv(size_0, BLOCK)
        place = 1
        before = size_0
        size = size_1
    if MODULES > 2 and place == 1 and tile >= tl.cdiv(size_1, BLOCK):
        tile -= tl.cdiv(size_1, BLOCK)
        place = 2
        before = size_0 + size_1
        size = size_2
    return place, size, before, tile


@triton.jit
def _group_kernel(
    slots, batch, sorted, order, token_slots, rows, ROWS: tl.constexpr, MANY: tl.constexpr, BLOCK: tl.constexpr
):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    other = tl.arange(0, MANY)
    mine = tl.load(slots + tl.load(batch + at, mask=at < rows, other=0), mask=at < rows, other=-1)
    theirs = tl.load(slots + tl.load(batch + other, mask=other < rows, other=0), mask=other < rows, other=-1)
    # Rows without an adapter come last; equal ones keep their order.
    key = tl.where(mine < 0, 0x7FFFFFFF, mine)[:, None]
    keys = tl.where(theirs < 0, 0x7FFFFFFF, theirs)[None, :]
    real = (other < rows)[None, :]
    same = (keys == key) & real
    earlier = tl.sum((same & (other[None, :] < at[:, None])).to(tl.int32), axis=1)
    place = tl.sum(((keys < key) & real).to(tl.int32), axis=1) + earlier
    count = tl.minimum(tl.sum(same.to(tl.int32), axis=1) - earlier, ROWS)
    known = at < rows
    line = sorted + place * 4
    tl.store(line, mine, mask=known)
    tl.store(line + 1, place, mask=known)
    tl.store(line + 2, tl.where(earlier % ROWS == 0, count, 0), mask=known)
    tl.store(line + 3, at, mask=known)
    tl.store(order + place, at, mask=known)
    tl.store(token_slots + at, mine, mask=known)


@triton.jit
def _enter_kernel(sorted, entries, counts, rows, MANY: tl.constexpr):
    at = tl.arange(0, MANY)
    known = at < rows
    slot = tl.load(sorted + at * 4, mask=known, other=-1)
    count = tl.load(sorted + at * 4 + 2, mask=known, other=0)
    leads = (count > 0).to(tl.int32)
    place = tl.cumsum(leads, axis=0) - leads
    total = tl.sum(leads, axis=0)
    tl.store(counts, tl.sum(leads * (slot >= 0).to(tl.int32), axis=0))
    tl.store(counts + 1, total)
    for column in tl.static_range(4):
        value = tl.load(sorted + at * 4 + column, mask=known, other=0)
        tl.store(entries + place * 4 + column, value, mask=known & (leads == 1))
    spare = known & (at >= total)
    tl.store(entries + at * 4, tl.full([MANY], -1, tl.int32), mask=spare)
    tl.store(entries + at * 4 + 2, tl.zeros([MANY], tl.int32), mask=spare)


def group_rows(slots_R: Tensor, batch_B: Tensor, batch: LoraBatch) -> None:
    """Write `batch`'s entries and order for the rows of a decode step.

    Args:
        slots_R: int32: the slot of each row's adapter, -1 for none.
        batch_B: int32: the rows of the batch.
        batch: Its entries and order have a place for each row of the batch.
    """
    rows, block = batch_B.shape[0], 16
    many = triton.next_power_of_2(rows)
    lines = torch.empty_like(batch.entries_E4)
    _group_kernel[(triton.cdiv(rows, block),)](
        slots_R, batch_B, lines, batch.order_N, batch.slots_N, rows,
        ROWS=batch.rows, MANY=many, BLOCK=block, num_warps=4,
    )  # fmt: skip
    _enter_kernel[(1,)](lines, batch.entries_E4, batch.counts, rows, MANY=many, num_warps=4)


@triton.jit
def _pick_kernel(table, entries, own, words, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    line = tl.maximum(tl.load(entries), 0).to(tl.int64) * words
    tl.store(own + at, tl.load(table + line + at, mask=at < words), mask=at < words)


def pick(batch: LoraBatch, own_M4: Tensor) -> None:
    """Copy the table's lines of the one adapter that `batch`'s rows wear, of any where they wear none, to `own_M4`."""
    words, block = own_M4.numel(), 1024
    _pick_kernel[(triton.cdiv(words, block),)](batch.table, batch.entries_E4, own_M4, words, BLOCK=block, num_warps=4)
