"""`in_code_order`: inputs of products with codes of 8 or 4 bits on CUDA (Triton), in the order in which the codes lie.

What they become is chosen by the codes and by the number of tokens: they stay bfloat16, or become 8-bit floats, or
float16, into which codes are converted in one step where bfloat16 takes three. The latter two have a smaller range than
bfloat16, and so a row is divided by a factor of its own: a power of two for float16, which rounds nothing but what is
smaller than 2^-29 of the row's largest number. A row's numbers depend on no other row. E inputs, N rows.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from headrace.ops.cuda.experts.memory import place_of

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["CodeInputs", "in_code_order"]


class CodeInputs(NamedTuple):
    """Inputs in the order of codes."""

    values_NE: Tensor
    """Inputs, bf16, float16 or 8-bit floats (e4m3), contiguous."""
    factors_N: Tensor | None
    """What a row was divided by, float32; None for 1."""


@triton.jit
def _code_order_kernel(
    x, out, factors, size, x_stride,
    BLOCK: tl.constexpr, BITS: tl.constexpr, FACTORS: tl.constexpr, CODES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    value = tl.load(x + row * x_stride + at, mask=at < size, other=0.0)
    if FACTORS:
        value = value.to(tl.float32)
        most = tl.max(tl.abs(value), axis=0)
        if CODES:
            factor = tl.maximum(most / 448.0, 1e-12)
            value = tl.div_rn(value, tl.zeros_like(value) + factor)
        else:  # the exponent of the largest becomes 14; that of the factor is kept normal, and so is its inverse's
            exponent = tl.minimum(tl.maximum(most.to(tl.int32, bitcast=True) >> 23, 15), 254) - 14
            factor = (exponent << 23).to(tl.float32, bitcast=True)
            value *= ((254 - exponent) << 23).to(tl.float32, bitcast=True)
        tl.store(factors + row, factor)
    tl.store(out + row * size + place_of(at, BITS), value.to(out.dtype.element_ty), mask=at < size)


def in_code_order(x_NE: Tensor, bits: int, dtype: torch.dtype, *, pdl: bool = False) -> CodeInputs:
    """Return inputs in the order in which codes lie.

    Args:
        x_NE: Input, bf16, last dimension contiguous.
        bits: Bits of a code, 8 or 4.
        dtype: What they become: bfloat16, float16 or float8_e4m3fn.
        pdl: Whether to use programmatic dependent launch.
    """
    rows, size = x_NE.shape
    values_NE = torch.empty(rows, size, dtype=dtype, device=x_NE.device)
    factors_N = None if dtype == x_NE.dtype else torch.empty(rows, dtype=torch.float32, device=x_NE.device)
    block = triton.next_power_of_2(size)
    _code_order_kernel[(rows,)](
        x_NE, values_NE, values_NE if factors_N is None else factors_N, size, x_NE.stride(0),
        BLOCK=block, BITS=bits, FACTORS=factors_N is not None, CODES=dtype == torch.float8_e4m3fn, PDL=pdl,
        num_warps=4 if block <= 4096 else 8, launch_pdl=pdl,
    )  # fmt: skip
    return CodeInputs(values_NE, factors_N)
