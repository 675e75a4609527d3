"""Where an expert's weight in codes lies, as a function of Triton's kernels."""

from __future__ import annotations

import triton
import triton.language as tl

from headrace.ops.cuda.codes.numbers import CodeMemory

__all__ = ["of_expert", "place_of"]


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
def place_of(column, BITS: tl.constexpr):
    """Return the place of a column's code, as codes/layout.py orders them: of 16 codes of 8 bits, 0, 8, 1, 9, then 2,
    10, 3, 11 and so on; of 32 of 4 bits, 0, 8, 16, 24, 1, 9, 17, 25, then 2, 10 and so on."""
    if BITS == 8:
        inside = column % 16
        place = (inside % 8) // 2 * 4 + inside // 8 + inside % 2 * 2
    else:
        inside = column % 32
        place = (inside % 8) // 2 * 8 + inside // 8 + inside % 2 * 4
    return column - inside + place
