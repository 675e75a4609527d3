"""`gather`: the input of a weight whose columns lie in an order of their own (Triton), gathered in that order.

I input features, N rows.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["gather"]

_BLOCK = 1024


@triton.jit
def _gather_inputs_kernel(x, order, out, size_in, x_stride, BLOCK: tl.constexpr, PDL: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < size_in
    source = tl.load(order + column, mask=inside, other=0)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    tl.store(out + row * size_in + column, tl.load(x + row * x_stride + source, mask=inside), mask=inside)


def gather(x_NI: Tensor, order_I: Tensor, out_NI: Tensor, *, pdl: bool = False) -> None:
    """Compute `out[n, i] = x[n, order[i]]`.

    Args:
        x_NI: Input, last dimension contiguous.
        order_I: Columns of the input, int32.
        out_NI: Output in the same dtype, contiguous; must not overlap the input.
        pdl: Whether to use programmatic dependent launch, in which the order is read before the wait.
    """
    rows, size_in = x_NI.shape
    _gather_inputs_kernel[(rows, triton.cdiv(size_in, _BLOCK))](
        x_NI, order_I, out_NI, size_in, x_NI.stride(0), BLOCK=_BLOCK, PDL=pdl, num_warps=4, launch_pdl=pdl
    )
