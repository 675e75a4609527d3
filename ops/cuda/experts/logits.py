"""`router_logits`: scores of all experts for each token on CUDA (Triton), in float32; never chooses.

The router's weight is float32, and sums are as exact as float32 is. Up to `VECTOR_ROWS` rows are multiplied without
tensor cores. With more, a weight is cut into three bfloat16 numbers whose sum it is, and each is multiplied by tensor
cores: all products are exact, since the input is bfloat16. The order of a sum depends on the number of inputs alone, so
that a row's logits do not depend on the other rows. N tokens, X experts, E inputs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["VECTOR_ROWS", "router_logits"]

VECTOR_ROWS: Final = 4
_MOST_INPUTS: Final = 4096
"""Inputs that a program without tensor cores reads at once."""
_ROWS, _EXPERTS, _INPUTS = 16, 16, 128
"""Tile of tensor cores, and the inputs of a step."""


@triton.jit
def _router_vector_kernel(
    x, router, bias, out, experts, size_in, x_stride,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, BLOCK: tl.constexpr, STEPS: tl.constexpr, BIAS: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    expert = tl.program_id(0)
    inner = tl.arange(0, BLOCK)
    line = router + expert.to(tl.int64) * size_in + inner
    weight = tl.load(line, mask=inner < size_in, other=0.0)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    column = tl.arange(0, COLUMNS)
    total = tl.zeros([COLUMNS], tl.float32)
    for step in tl.static_range(STEPS):
        inside = step * BLOCK + inner < size_in
        if step > 0:
            weight = tl.load(line + step * BLOCK, mask=inside, other=0.0)
        for row in tl.static_range(ROWS):
            value = tl.load(x + row * x_stride + step * BLOCK + inner, mask=inside, other=0.0).to(tl.float32)
            total += tl.where(column == row, tl.sum(weight * value, axis=0), 0.0)
    if BIAS:
        total += tl.load(bias + expert)
    tl.store(out + column * experts + expert, total, mask=column < ROWS)


@triton.jit(do_not_specialize=["rows"])
def _router_tile_kernel(
    x, router, bias, out, rows, experts, size_in, x_stride,
    ROWS: tl.constexpr, EXPERTS: tl.constexpr, BLOCK: tl.constexpr, BIAS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    expert = tl.program_id(1) * EXPERTS + tl.arange(0, EXPERTS)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    known = expert < experts
    real = row < rows
    inner = tl.arange(0, BLOCK)
    line = router + tl.where(known, expert, 0).to(tl.int64)[None, :] * size_in + inner[:, None]
    x_line = x + row.to(tl.int64)[:, None] * x_stride + inner[None, :]
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    total = tl.zeros([ROWS, EXPERTS], tl.float32)
    for start in range(0, size_in, BLOCK):
        inside = start + inner < size_in
        value = tl.load(x_line + start, mask=real[:, None] & inside[None, :], other=0.0)
        rest = tl.load(line + start, mask=inside[:, None], other=0.0)
        for _ in tl.static_range(3):
            part = rest.to(tl.bfloat16)
            total = tl.dot(value, part, total)
            rest -= part.to(tl.float32)
    if BIAS:
        total += tl.load(bias + expert, mask=known, other=0.0)[None, :]
    tl.store(out + row.to(tl.int64)[:, None] * experts + expert[None, :], total, mask=real[:, None] & known[None, :])


def router_logits(x_NE: Tensor, router_XE: Tensor, bias_X: Tensor | None, out_NX: Tensor, *, pdl: bool = False) -> None:
    """Compute `out = x W^T + b` in float32.

    Args:
        x_NE: Input, bf16, last dimension contiguous.
        router_XE: Weight, float32, contiguous.
        bias_X: Bias, float32, or None.
        out_NX: Output, float32, contiguous.
        pdl: Whether to use programmatic dependent launch; the weight is then read before the wait.
    """
    (rows, size_in), experts = x_NE.shape, len(router_XE)
    bias, has_bias = router_XE if bias_X is None else bias_X, bias_X is not None
    if rows <= VECTOR_ROWS:
        block = min(_MOST_INPUTS, triton.next_power_of_2(size_in))
        _router_vector_kernel[(experts,)](
            x_NE, router_XE, bias, out_NX, experts, size_in, x_NE.stride(0),
            ROWS=rows, COLUMNS=VECTOR_ROWS, BLOCK=block, STEPS=triton.cdiv(size_in, block), BIAS=has_bias, PDL=pdl,
            num_warps=4, launch_pdl=pdl,
        )  # fmt: skip
        return
    _router_tile_kernel[(triton.cdiv(rows, _ROWS), triton.cdiv(experts, _EXPERTS))](
        x_NE, router_XE, bias, out_NX, rows, experts, size_in, x_NE.stride(0),
        ROWS=_ROWS, EXPERTS=_EXPERTS, BLOCK=_INPUTS, BIAS=has_bias, PDL=pdl,
        num_warps=4, num_stages=3, launch_pdl=pdl,
    )  # fmt: skip
