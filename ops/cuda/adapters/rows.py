"""The assignment of low-rank adapters to a step's tokens, as the CUDA kernels read it; never loads an adapter.

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
    "UpdateSite",
    "group_rows",
    "module_of",
    "pick",
]

UNIT = 8
"""Elements per unit of a table's offsets."""
GROUP = 32
"""Most rows in one entry of a decode step."""
ALIKE = 256
"""Most rows in one entry where all rows with an adapter use the same one."""
SEGMENT = 64
"""Most tokens in one entry of a prefill."""


class UpdateTiling(NamedTuple):
    """Division of one launch into tiles."""

    rank: int
    """Rows of A, or of transposed B, in a tile."""
    block: int
    """Features in a tile."""
    warps: int
    steps: int = 1
    """Number of tiles that a program works on, one after another."""


class LoraSite(NamedTuple):
    """One product of one layer."""

    line: int
    """Index in the table of the site's first module."""
    size_in: int
    sizes_out: tuple[int, ...]
    """Output features of each module."""


@dataclass(frozen=True, slots=True, eq=False)
class LoraBatch:
    """The adapters of a step's tokens; the device reads everything when a graph replays."""

    arena: Tensor
    """Blocks of all adapters, bf16 or fp16."""
    table: Tensor
    """Line of each module, int32 [slots, modules, 4]: the places of A and B in the arena, in units of `UNIT`; the rank,
    which is 0 without an update; and the ranks of its site's modules before it."""
    entries_E4: Tensor
    """Entries, int32: (slot or -1, first place in `order_N`, tokens, the first token) of up to `rows` tokens of one
    adapter or of none; every token belongs to one entry. Entries with a slot come first; spare ones have no tokens."""
    counts: Tensor
    """Number of entries with a slot, and of all that have tokens, int32 [2]; not read where `rows` is 1."""
    order_N: Tensor
    """Indices of tokens, int32, with those of one entry next to each other."""
    slots_N: Tensor
    """Slot of each token, or -1, int32."""
    rows: int
    """Most tokens in an entry: 1, `GROUP`, `ALIKE` or `SEGMENT`."""
    max_rank: int
    shared_bytes: int
    """Most dynamic shared memory that one block may have on this GPU, in bytes."""


class UpdateSite(NamedTuple):
    """One site's modules of the one adapter that rows of a step use, in a batch whose `rows` is `ALIKE`."""

    arena: Tensor
    own_M4: Tensor
    """Lines of the table, int32, contiguous, with ranks up to compiling/source.py's `INSIDE_RANK`."""
    slots_N: Tensor
    """Slot of each row, or -1, int32."""


@triton.jit
def module_of(tile, size_0, size_1, size_2, BLOCK: tl.constexpr, MODULES: tl.constexpr):
    """Return (module, its size, the features before it, the tile within it) for a tile of a site's modules."""
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
    # Rows without an adapter come last; rows of one adapter keep their order.
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
        slots_R: Slot of each row's adapter, int32, -1 for none.
        batch_B: Rows of the batch, int32.
        batch: The batch to write, with room for an entry and a place for each row.
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
    """Copy the table's lines of the one adapter that `batch`'s rows use, or of slot 0 if none is used, to `own_M4`."""
    words, block = own_M4.numel(), 1024
    _pick_kernel[(triton.cdiv(words, block),)](batch.table, batch.entries_E4, own_M4, words, BLOCK=block, num_warps=4)
