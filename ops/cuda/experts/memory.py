"""Where an expert's weight in codes lies, as a function of Triton's kernels."""

from __future__ import annotations

import triton
import triton.language as tl

from headrace.ops.cuda.codes.numbers import CodeMemory

__all__ = ["of_expert"]


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
