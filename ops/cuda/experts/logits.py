"""`router_logits`: scores of all experts for each token on CUDA (Triton), in float32; never chooses.

The router's weight is float32, and sums are as exact as float32 is: `split_router` of registry.py cuts a weight into
three bfloat16 numbers whose sum it is. Up to `_VECTOR_ROWS` rows are multiplied by that sum without tensor cores. With
more, each of the three is multiplied by tensor cores: all products are exact, since the input is bfloat16. Of few rows
the inputs are divided among programs, so that all multiprocessors take part; who chooses adds up their sums
(choose.py). The order of a sum depends on the number of inputs alone, but for ranges of rows, so that a row's logits do
not depend on the other rows. N tokens, X experts, E inputs, S divisions of the inputs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["allocate_logits", "router_logits"]

_VECTOR_ROWS: Final = 4
"""Most rows that are multiplied without tensor cores."""
_MOST_INPUTS: Final = 4096
"""Inputs that a program without tensor cores reads at once."""
_DIVIDED_ROWS: Final = 64
"""Most rows whose inputs are divided among programs."""
_DIVISIONS: Final = 4
_INPUTS: Final = 128
"""Inputs of a step of few rows, of which a program has 16; of more, a program has 64, and a step half as many."""


def allocate_logits(rows: int, experts: int, device: torch.device) -> Tensor:
    """Return memory for the logits of `rows` tokens, float32 [S, N, X]: their sum is the logits."""
    divisions = _DIVISIONS if _VECTOR_ROWS < rows <= _DIVIDED_ROWS else 1
    return torch.empty(divisions, rows, experts, dtype=torch.float32, device=device)


@triton.jit
def _whole(line, plane, mask):
    """Return the router's weights of a line, in float32."""
    total = tl.load(line + 2 * plane, mask=mask, other=0.0).to(tl.float32)
    total += tl.load(line + plane, mask=mask, other=0.0).to(tl.float32)
    return total + tl.load(line, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def _router_vector_kernel(
    x, router, bias, out, experts, size_in, plane, x_stride,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, BLOCK: tl.constexpr, STEPS: tl.constexpr, BIAS: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    expert = tl.program_id(0)
    inner = tl.arange(0, BLOCK)
    line = router + expert.to(tl.int64) * size_in + inner
    weight = _whole(line, plane, inner < size_in)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    column = tl.arange(0, COLUMNS)
    total = tl.zeros([COLUMNS], tl.float32)
    for step in tl.static_range(STEPS):
        inside = step * BLOCK + inner < size_in
        if step > 0:
            weight = _whole(line + step * BLOCK, plane, inside)
        for row in tl.static_range(ROWS):
            value = tl.load(x + row * x_stride + step * BLOCK + inner, mask=inside, other=0.0).to(tl.float32)
            total += tl.where(column == row, tl.sum(weight * value, axis=0), 0.0)
    if BIAS:
        total += tl.load(bias + expert)
    tl.store(out + column * experts + expert, total, mask=column < ROWS)


@triton.jit(do_not_specialize=["rows"])
def _router_tile_kernel(
    x, router, bias, out, rows, experts, size_in, plane, x_stride, share,
    ROWS: tl.constexpr, EXPERTS: tl.constexpr, BLOCK: tl.constexpr, BIAS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    expert = tl.program_id(1) * EXPERTS + tl.arange(0, EXPERTS)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    begin = tl.program_id(2) * share
    known = expert < experts
    real = row < rows
    inner = tl.arange(0, BLOCK)
    line = router + tl.where(known, expert, 0).to(tl.int64)[None, :] * size_in + inner[:, None]
    x_line = x + tl.where(real, row, 0).to(tl.int64)[:, None] * x_stride + inner[None, :]
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    total = tl.zeros([ROWS, EXPERTS], tl.float32)
    for start in range(begin, tl.minimum(begin + share, size_in), BLOCK):
        inside = start + inner < size_in
        value = tl.load(x_line + start, mask=inside[None, :], other=0.0)
        for part in tl.static_range(3):
            weight = tl.load(line + part * plane + start, mask=inside[:, None], other=0.0)
            total = tl.dot(value, weight, total)
    if BIAS:
        if begin == 0:
            total += tl.load(bias + expert, mask=known, other=0.0)[None, :]
    out += tl.program_id(2).to(tl.int64) * rows * experts
    tl.store(out + row.to(tl.int64)[:, None] * experts + expert[None, :], total, mask=real[:, None] & known[None, :])


def router_logits(
    x_NE: Tensor, router_3XE: Tensor, bias_X: Tensor | None, out_SNX: Tensor, *, pdl: bool = False
) -> None:
    """Compute `x W^T + b` in float32, as sums over divisions of the inputs.

    Args:
        x_NE: Input, bf16, last dimension contiguous.
        router_3XE: Weight as `split_router` of registry.py cuts it, contiguous.
        bias_X: Bias, float32, or None.
        out_SNX: Output from `allocate_logits`, whose sum over S is the logits.
        pdl: Whether to use programmatic dependent launch; the weight of few rows is then read before the wait.
    """
    (rows, size_in), experts, plane = x_NE.shape, router_3XE.shape[1], router_3XE.stride(0)
    bias, has_bias = out_SNX if bias_X is None else bias_X, bias_X is not None
    if rows <= _VECTOR_ROWS:
        block = min(_MOST_INPUTS, triton.next_power_of_2(size_in))
        _router_vector_kernel[(experts,)](
            x_NE, router_3XE, bias, out_SNX, experts, size_in, plane, x_NE.stride(0),
            ROWS=rows, COLUMNS=_VECTOR_ROWS, BLOCK=block, STEPS=triton.cdiv(size_in, block), BIAS=has_bias, PDL=pdl,
            num_warps=4, launch_pdl=pdl,
        )  # fmt: skip
        return
    tile_rows, tile_experts, block = (16, 16, _INPUTS) if rows <= _DIVIDED_ROWS else (64, 32, _INPUTS // 2)
    divisions = len(out_SNX)
    share = triton.cdiv(triton.cdiv(size_in, _INPUTS), divisions) * _INPUTS
    _router_tile_kernel[(triton.cdiv(rows, tile_rows), triton.cdiv(experts, tile_experts), divisions)](
        x_NE, router_3XE, bias, out_SNX, rows, experts, size_in, plane, x_NE.stride(0), share,
        ROWS=tile_rows, EXPERTS=tile_experts, BLOCK=block, BIAS=has_bias, PDL=pdl,
        num_warps=4, num_stages=3, launch_pdl=pdl,
    )  # fmt: skip
