"""The end of products whose inner dimension may be split among programs (Triton): adds up the splits, and stores.

The sums of the splits are added in a fixed order by the program that comes last, so that results do not vary from run
to run. O outputs of a tile, N rows.
"""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["store_sums"]


@triton.jit
def store_sums(
    total, target, mask, planes, counters, tile, split, OUT: tl.constexpr, ROWS: tl.constexpr, SPLITS: tl.constexpr
):
    """Store a tile's sums [O, N] at the pointers `target`, once those of all splits are there.

    `planes` has room for O * N * SPLITS float32 numbers of each tile, and `counters` is zero before and afterwards.
    """
    if SPLITS == 1:
        tl.store(target, total.to(target.dtype.element_ty), mask=mask)
    else:
        own = tl.arange(0, OUT)[:, None] * ROWS + tl.arange(0, ROWS)[None, :]
        plane = planes + tile * (SPLITS * OUT * ROWS) + own
        tl.store(plane + split * (OUT * ROWS), total)
        tl.debug_barrier()
        arrived = tl.atomic_add(counters + tile, 1, sem="acq_rel", scope="gpu")
        if arrived == SPLITS - 1:
            total = tl.zeros([OUT, ROWS], tl.float32)
            for other in tl.static_range(SPLITS):
                total += tl.load(plane + other * (OUT * ROWS), cache_modifier=".cg")
            tl.store(target, total.to(target.dtype.element_ty), mask=mask)
            tl.store(counters + tile, 0)
