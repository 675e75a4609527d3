"""`to_codes`: rounds activations to 8-bit floats with a scale for each row (Triton), for products of many rows.

I input features, O output features, N rows.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["to_codes"]


@triton.jit
def _to_codes_kernel(x, codes, scales, size_in, x_stride, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    value = tl.load(x + row * x_stride + column, mask=column < size_in, other=0.0).to(tl.float32)
    scale = tl.maximum(tl.max(tl.abs(value), axis=0) / 448.0, 1e-12)
    tl.store(scales + row, scale)
    # The order of columns is that of a weight's codes (codes.py).
    place = column // 16 * 16 + column % 8 // 2 * 4 + column % 16 // 8 + column % 2 * 2
    tl.store(codes + row * size_in + place, (value / scale).to(tl.float8e4nv), mask=column < size_in)


def to_codes(x_NI: Tensor) -> tuple[Tensor, Tensor]:
    """Return (8-bit floats [N, I] in the order of a weight's codes, their scales, float32 [N, 1])."""
    rows, size_in = x_NI.shape
    codes_NI = torch.empty(rows, size_in, dtype=torch.float8_e4m3fn, device=x_NI.device)
    scales_N1 = torch.empty(rows, 1, dtype=torch.float32, device=x_NI.device)
    block = triton.next_power_of_2(size_in)
    _to_codes_kernel[(rows,)](
        x_NI, codes_NI, scales_N1, size_in, x_NI.stride(0), BLOCK=block, num_warps=4 if block <= 4096 else 8
    )
    return codes_NI, scales_N1
