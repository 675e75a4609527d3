"""The ring of csrc/even_decode.cu in shared memory: its size, which the source checks as it compiles."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from headrace.ops.cuda.attention.shape import HeadShape

__all__ = ["KV_HEADS", "shared_bytes"]

KV_HEADS: Final = 8
"""Most key heads of a block."""
_RING_BYTES = 96 << 10
_MOST_SLOTS = 32
_BARRIER_BYTES = 16  # two barriers for each slot


def shared_bytes(shape: HeadShape) -> int:
    """Return the bytes of shared memory that a block wants."""
    piece = shape.page_bytes // 2
    warps = max(1, KV_HEADS // shape.kv_heads)
    turns = 1 if warps == 1 else 2 * warps
    slots = -(-min(_RING_BYTES // piece, _MOST_SLOTS) // turns) * turns
    return slots * (piece + _BARRIER_BYTES)
