"""Keeps on CUDA what drafts will be made of later: a state of each row's token, in a ring by its position.

Runs no model, and drafts nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import triton
import triton.language as tl

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["keep_states"]

_BLOCK = 4096


# fmt: off
@triton.jit
def _keep_kernel(states, rows, positions, ring, width, stride, LAG: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    place = tl.load(rows + at).to(tl.int64) * LAG + tl.load(positions + at) % LAG
    state = tl.load(states + at * stride + column, mask=column < width)
    tl.store(ring + place * width + column, state, mask=column < width)


# fmt: on
def keep_states(states_BE: Tensor, rows_B: Tensor, positions_B: Tensor, ring_RWE: Tensor) -> None:
    """Compute `ring[row, position % W] = state`; a graph can capture it.

    Args:
        states_BE: States, last dimension contiguous.
        rows_B: Row of each, int32; of rows that come twice, either state is kept.
        positions_B: Position of each in its row, int32 or int64.
        ring_RWE: The latest W states of each row, of the dtype of `states_BE`, contiguous.
    """
    _, lag, width = ring_RWE.shape
    _keep_kernel[(len(rows_B), triton.cdiv(width, _BLOCK))](
        states_BE, rows_B, positions_B, ring_RWE, width, states_BE.stride(0),
        LAG=lag, BLOCK=min(_BLOCK, triton.next_power_of_2(width)), num_warps=8,
    )  # fmt: skip
