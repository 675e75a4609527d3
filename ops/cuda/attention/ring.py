"""The shared memory of csrc/even_decode.cu: a ring and queries, whose sizes the source checks as it compiles."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from headrace.ops.cuda.attention.shape import HeadShape

__all__ = ["KV_HEADS", "QUERIES", "query_room", "shared_bytes"]

KV_HEADS: Final = 8
"""Most key heads of a block."""
QUERIES: Final = (8, 16, 32)
"""The queries of a row and key head that a warp can have room for; the last of these keeps them in shared memory."""
_RING_BYTES = 96 << 10
_MOST_SLOTS = 32
_BARRIER_BYTES = 16  # two barriers for each slot


def query_room(shape: HeadShape, lines: int) -> int | None:
    """Return for how many queries a warp has room, for rows of `lines` lines; None if it cannot have that many."""
    queries = lines * shape.heads // shape.kv_heads
    sizes = QUERIES if lines == 1 else QUERIES[1:]  # all numbers of lines share two kernels
    return next((size for size in sizes if queries <= size), None)


def shared_bytes(shape: HeadShape, queries: int = 0) -> int:
    """Return the bytes of shared memory that a block wants whose warps have room for `queries` queries."""
    piece = shape.page_bytes // 2
    warps = max(1, KV_HEADS // shape.kv_heads)
    turns = 1 if warps == 1 else 2 * warps
    slots = -(-min(_RING_BYTES // piece, _MOST_SLOTS) // turns) * turns
    kept = shape.kv_heads * warps * queries * shape.head_dim * 2 if queries == QUERIES[-1] else 0
    return slots * (piece + _BARRIER_BYTES) + kept
