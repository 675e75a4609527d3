"""`gathered_rows`: the rows of each expert's tokens one behind another on CUDA (Triton), in the order of the lists.

P places, N tokens, I inputs; choose.py says what a place is.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

if TYPE_CHECKING:
    from torch import Tensor

    from headrace.ops.cuda.experts.choose import Choices, Lists

__all__ = ["gathered_rows"]


_FEW: Final = 4096
"""Places up to which each has a program."""
_ROWS: Final = 4
"""Places of a program beyond these: what a program reads before it knows its rows takes longer than a row."""


@triton.jit
def _gather_rows_kernel(
    x, lists, out, size, x_stride, K: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    place = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    at = tl.arange(0, BLOCK)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    tiles = tl.load(lists.ends_2)
    if tiles == 0:
        return
    last = lists.tiles_T3 + (tiles - 1) * 3
    taken = place < tl.load(last + 1) + tl.load(last + 2)
    token = (tl.load(lists.pairs_P + place, mask=taken, other=0) // K).to(tl.int64)
    inside = taken[:, None] & (at < size)[None, :]
    row = tl.load(x + token[:, None] * x_stride + at[None, :], mask=inside, other=0.0)
    tl.store(out + place.to(tl.int64)[:, None] * size + at[None, :], row, mask=inside)


def gathered_rows(x_NI: Tensor, chosen: Choices, lists: Lists, *, pdl: bool = False) -> Tensor:
    """Return the row of each place's token, [P, I], contiguous; rows of places that no token has are undefined.

    Args:
        x_NI: Input, last dimension contiguous.
        chosen: Choices.
        lists: Lists of the choices.
        pdl: Whether to use programmatic dependent launch.
    """
    places, size = len(lists.pairs_P), x_NI.shape[1]
    out_PI = torch.empty(places, size, dtype=x_NI.dtype, device=x_NI.device)
    block, rows = triton.next_power_of_2(size), 1 if places <= _FEW else _ROWS
    _gather_rows_kernel[(triton.cdiv(places, rows),)](
        x_NI, lists, out_PI, size, x_NI.stride(0), K=chosen.ids_NK.shape[1], ROWS=rows, BLOCK=block, PDL=pdl,
        num_warps=4 if rows * block <= 4096 else 8, launch_pdl=pdl,
    )  # fmt: skip
    return out_PI
