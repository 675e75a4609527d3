"""Where an expert's weight in codes lies, as a function of Triton's kernels."""

from __future__ import annotations

import triton
import triton.language as tl

from headrace.ops.cuda.codes.numbers import CodeMemory

__all__ = ["byte_of", "of_expert"]


@triton.jit
def of_expert(memory, pitches, expert):
    """Return the parts of an expert's weight, by those of the first and their distances (`CodePitches`)."""
    expert = expert.to(tl.int64)
    return CodeMemory(
        memory.words + expert * pitches.words,
        memory.high + expert * pitches.high,
        memory.scales + expert * pitches.scales,
        memory.zeros + expert * pitches.zeros,
        memory.factors + expert * pitches.factors,
        memory.table + expert * pitches.table,
        memory.pitch,
        memory.constant,
    )


@triton.jit
def byte_of(column):
    """Return the place of a column's code of 8 bits: each 16 lie as 0, 8, 1, 9, then 2, 10, 3, 11 and so on."""
    inside = column % 16
    return column - inside + (inside % 8) // 2 * 4 + inside // 8 + inside % 2 * 2
