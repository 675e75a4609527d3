"""`vector_up` and `vector_down`: products of few tokens with the weights of their experts on CUDA (Triton).

Without tensor cores and without lists: a program reads the number of a token's expert, and then its weights. The second
product adds the results of a token's experts at once, so that nothing is left to combine. Where several tokens choose
an expert, programs that read the same of it are neighbours, and all but one find it in the L2 cache. Letters as in
tiles.py; F gates of an expert.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from headrace.ops.cuda.experts.activation import activated

if TYPE_CHECKING:
    from torch import Tensor

    from headrace.ops.cuda.experts.arena import Arena
    from headrace.ops.cuda.experts.choose import Choices
    from headrace.ops.routing import ExpertActivation

__all__ = ["ExpertVectorTiling", "vector_down", "vector_down_tiling", "vector_up", "vector_up_tiling"]


class ExpertVectorTiling(NamedTuple):
    """The work of a program; sizes are powers of two."""

    outputs: int
    block: int
    """Inputs that are read at once."""
    warps: int


_MOST_UP: Final = 8192
"""Elements of gates, and of ups, that a program reads at once; not measured."""
_MOST_DOWN: Final = 16384
"""The same of downs, of all of a token's experts together; not measured."""
_MOST_OUTPUTS: Final = 4


@triton.jit
def _expert_up_kernel(
    x, weight, bias, ids, out, pitch, size_out, size_in, x_stride,
    K: tl.constexpr, BLOCK_OUT: tl.constexpr, BLOCK: tl.constexpr, STEPS: tl.constexpr, ACTIVATION: tl.constexpr,
    BIAS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    pair = tl.program_id(0)
    feature = tl.program_id(1) * BLOCK_OUT + tl.arange(0, BLOCK_OUT)
    inner = tl.arange(0, BLOCK)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    expert = tl.load(ids + pair).to(tl.int64)
    if expert < 0:
        return
    gate_line = tl.minimum(feature, size_out - 1).to(tl.int64)
    gate_at = weight + expert * pitch + gate_line[:, None] * size_in + inner[None, :]
    up_at = gate_at + size_out.to(tl.int64) * size_in
    row = x + (pair // K).to(tl.int64) * x_stride + inner
    gate = tl.zeros([BLOCK_OUT], tl.float32)
    up = tl.zeros([BLOCK_OUT], tl.float32)
    w = tl.load(gate_at, mask=(inner < size_in)[None, :], other=0.0)
    w_up = tl.load(up_at, mask=(inner < size_in)[None, :], other=0.0)
    for step in tl.static_range(STEPS):
        if step + 1 < STEPS:
            inside = (step + 1) * BLOCK + inner < size_in
            w_next = tl.load(gate_at + (step + 1) * BLOCK, mask=inside[None, :], other=0.0)
            up_next = tl.load(up_at + (step + 1) * BLOCK, mask=inside[None, :], other=0.0)
        value = tl.load(row + step * BLOCK, mask=step * BLOCK + inner < size_in, other=0.0).to(tl.float32)
        gate += tl.sum(w.to(tl.float32) * value[None, :], axis=1)
        up += tl.sum(w_up.to(tl.float32) * value[None, :], axis=1)
        if step + 1 < STEPS:
            w = w_next
            w_up = up_next
    if BIAS:
        bias += expert * (2 * size_out)
        gate += tl.load(bias + gate_line)
        up += tl.load(bias + gate_line + size_out)
    result = activated(gate, up, ACTIVATION)
    tl.store(out + pair * size_out + feature, result.to(out.dtype.element_ty), mask=feature < size_out)


def vector_up(
    x_NE: Tensor,
    weight: Arena,
    bias_XL: Tensor | None,
    chosen: Choices,
    out_PF: Tensor,
    activation: ExpertActivation,
    *,
    pdl: bool = False,
    how: ExpertVectorTiling | None = None,
) -> None:
    """Compute activation(gate) * up of each pair.

    Args:
        x_NE: Input, bf16, last dimension contiguous.
        weight: Weights of all experts, dense; each has F gates, then F ups.
        bias_XL: Biases of the lines of each expert's weight, float32, contiguous, or None.
        chosen: Choices.
        out_PF: Output by pair, contiguous.
        activation: Activation of gates.
        pdl: Whether to use programmatic dependent launch.
        how: Division of the work; None for that of `vector_up_tiling`.
    """
    (pairs, size_out), size_in = out_PF.shape, x_NE.shape[1]
    how = how or vector_up_tiling(size_in)
    _expert_up_kernel[(pairs, triton.cdiv(size_out, how.outputs))](
        x_NE, weight.first, x_NE if bias_XL is None else bias_XL, chosen.ids_NK, out_PF, weight.pitch, size_out,
        size_in, x_NE.stride(0),
        K=chosen.ids_NK.shape[1], BLOCK_OUT=how.outputs, BLOCK=how.block, STEPS=triton.cdiv(size_in, how.block),
        ACTIVATION=activation, BIAS=bias_XL is not None, PDL=pdl, num_warps=how.warps, launch_pdl=pdl,
    )  # fmt: skip


@triton.jit
def _expert_down_kernel(
    x, weight, bias, chosen, out, pitch, size_out, size_in,
    K: tl.constexpr, RANKS: tl.constexpr, BLOCK_OUT: tl.constexpr, BLOCK: tl.constexpr, STEPS: tl.constexpr,
    BIAS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    feature = tl.program_id(1) * BLOCK_OUT + tl.arange(0, BLOCK_OUT)
    inner = tl.arange(0, BLOCK)
    rank = tl.arange(0, RANKS)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    pair = row * K + rank
    expert = tl.load(chosen.ids_NK + pair, mask=rank < K, other=-1)
    real = expert >= 0
    factor = tl.load(chosen.weights_NK + pair, mask=real, other=0.0)
    expert = tl.maximum(expert, 0).to(tl.int64)
    line = tl.minimum(feature, size_out - 1).to(tl.int64)
    at = weight + (expert * pitch)[:, None, None] + line[None, :, None] * size_in + inner[None, None, :]
    total = tl.zeros([RANKS, BLOCK_OUT], tl.float32)
    for step in tl.static_range(STEPS):
        inside = real[:, None] & (step * BLOCK + inner < size_in)[None, :]
        w = tl.load(at + step * BLOCK, mask=inside[:, None, :], other=0.0)
        value = tl.load(x + pair[:, None] * size_in + step * BLOCK + inner[None, :], mask=inside, other=0.0)
        total += tl.sum(w.to(tl.float32) * value.to(tl.float32)[:, None, :], axis=2)
    if BIAS:
        total += tl.load(bias + expert[:, None] * size_out + line[None, :])
    result = tl.sum(total * factor[:, None], axis=0)
    spot = out + row.to(tl.int64) * size_out + feature
    tl.store(spot, result.to(out.dtype.element_ty), mask=feature < size_out)


def vector_down(
    x_PF: Tensor,
    weight: Arena,
    bias_XL: Tensor | None,
    chosen: Choices,
    out_NE: Tensor,
    *,
    pdl: bool = False,
    how: ExpertVectorTiling | None = None,
) -> None:
    """Compute the weighted sum of the results of each token's experts; zeros for a token without any.

    Args:
        x_PF: Input by pair, bf16, contiguous.
        weight: Weights of all experts, dense.
        bias_XL: Biases of the results of each expert, float32, contiguous, or None.
        chosen: Choices.
        out_NE: Output, contiguous.
        pdl: Whether to use programmatic dependent launch.
        how: Division of the work; None for that of `vector_down_tiling`.
    """
    (rows, size_out), size_in, ranks = out_NE.shape, x_PF.shape[1], chosen.ids_NK.shape[1]
    how = how or vector_down_tiling(size_in, ranks)
    _expert_down_kernel[(rows, triton.cdiv(size_out, how.outputs))](
        x_PF, weight.first, x_PF if bias_XL is None else bias_XL, chosen, out_NE, weight.pitch, size_out, size_in,
        K=ranks, RANKS=triton.next_power_of_2(ranks), BLOCK_OUT=how.outputs, BLOCK=how.block,
        STEPS=triton.cdiv(size_in, how.block), BIAS=bias_XL is not None, PDL=pdl,
        num_warps=how.warps, launch_pdl=pdl,
    )  # fmt: skip


def vector_up_tiling(size_in: int) -> ExpertVectorTiling:
    """Return the division of the first product; not measured."""
    block = min(_MOST_UP // 2, triton.next_power_of_2(size_in))
    return ExpertVectorTiling(min(_MOST_OUTPUTS, _MOST_UP // block), block, 8)


def vector_down_tiling(size_in: int, ranks: int) -> ExpertVectorTiling:
    """Return the division of the second product; not measured."""
    ranks = triton.next_power_of_2(ranks)
    block = min(_MOST_DOWN // (2 * ranks), triton.next_power_of_2(size_in))
    return ExpertVectorTiling(min(_MOST_OUTPUTS, _MOST_DOWN // (ranks * block)), block, 8)
