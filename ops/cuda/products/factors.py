"""`finish_norm`: the factors of a norm on CUDA (Triton), for what reads a norm of which a product has done a part.

Letters as in fusion.py; Q parts of the sum whose squares are summed together.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["finish_norm"]


@triton.jit
def _finish_norm_kernel(
    x, squares, rows, parts, size, x_stride, eps, PARTS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr
):
    row = tl.program_id(0)
    at = tl.arange(0, BLOCK)
    part = tl.arange(0, PARTS)
    spot = x + row.to(tl.int64) * x_stride + at
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    value = tl.load(spot, mask=at < size, other=0.0).to(tl.float32)
    whole = tl.sum(tl.load(squares + part * rows + row, mask=part < parts, other=0.0), axis=0)
    tl.store(spot, (value * tl.rsqrt(whole / size + eps)).to(x.dtype.element_ty), mask=at < size)


def finish_norm(x_NE: Tensor, squares_QN: Tensor, eps: float, *, pdl: bool = False) -> None:
    """Multiply a sum times a norm's weight by the norm's factors, in place.

    Args:
        x_NE: The sum times the weight, last dimension contiguous; its norm when this is done.
        squares_QN: Squares of the sum, summed over parts of it, float32, contiguous.
        eps: Epsilon of the norm.
        pdl: Whether to use programmatic dependent launch.
    """
    (parts, rows), size = squares_QN.shape, x_NE.shape[1]
    _finish_norm_kernel[(rows,)](
        x_NE, squares_QN, rows, parts, size, x_NE.stride(0), eps,
        PARTS=triton.next_power_of_2(parts), BLOCK=triton.next_power_of_2(size), PDL=pdl,
        num_warps=8, launch_pdl=pdl,
    )  # fmt: skip
