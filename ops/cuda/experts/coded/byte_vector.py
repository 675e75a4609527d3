"""`byte_vector_up` and `byte_vector_down`: products of few tokens with experts' codes of 8 bits on CUDA (Triton).

As vector.py, for the codes that `takes_bytes` of byte_tiles.py allows. A program reads lines as they lie and gathers
the inputs in the same order, since there are fewer of these.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from headrace.ops.cuda.experts.activation import activated, halves
from headrace.ops.cuda.experts.coded.byte_tiles import memory_of
from headrace.ops.cuda.experts.vector import ExpertVectorTiling

if TYPE_CHECKING:
    from torch import Tensor

    from headrace.ops.cuda.experts.arena import Arena
    from headrace.ops.cuda.experts.choose import Choices
    from headrace.ops.routing import ExpertActivation

__all__ = ["byte_vector_down", "byte_vector_up"]

_TILING: Final = ExpertVectorTiling(4, 2048, 4)
"""Lines of a program, gates and ups included, the most inputs that it reads at once, and its warps; not measured."""


@triton.jit
def _column_of(place):
    """Return the column whose code lies at a place, the inverse of `place_of` of memory.py."""
    inside = place % 16
    return place - inside + inside // 4 * 2 + inside % 2 * 8 + inside % 4 // 2


@triton.jit
def _byte_sums(
    x, memory, expert, line, size_in,
    LINES: tl.constexpr, BLOCK: tl.constexpr, STEPS: tl.constexpr, GROUP: tl.constexpr, SHARE: tl.constexpr,
):  # fmt: skip
    """Return the products of an input with some lines of an expert's weight."""
    GROUPS: tl.constexpr = BLOCK // GROUP if GROUP > 0 else 1  # of a step
    inner = tl.arange(0, BLOCK)
    column = _column_of(inner)
    w_at = memory.codes + expert * memory.pitch + line.to(tl.int64)[:, None] * size_in + inner[None, :]
    scale_at = memory.scales + expert * memory.scale_pitch + line // SHARE
    total = tl.zeros([LINES], tl.float32)
    w = tl.load(w_at, mask=(inner < size_in)[None, :], other=0.0)
    for step in tl.static_range(STEPS):
        if step + 1 < STEPS:
            inside = (step + 1) * BLOCK + inner < size_in
            w_next = tl.load(w_at + (step + 1) * BLOCK, mask=inside[None, :], other=0.0)
        value = tl.load(x + step * BLOCK + column, mask=step * BLOCK + inner < size_in, other=0.0).to(tl.float32)
        product = w.to(tl.float32) * value[None, :]
        if GROUP == 0:
            total += tl.sum(product, axis=1)
        else:
            group = step * GROUPS + tl.arange(0, GROUPS)
            at = scale_at[:, None] + group[None, :] * memory.group_pitch
            scale = tl.load(at, mask=(group * GROUP < size_in)[None, :], other=0.0).to(tl.float32)
            total += tl.sum(tl.sum(product.reshape(LINES, GROUPS, GROUP), axis=2) * scale, axis=1)
        if step + 1 < STEPS:
            w = w_next
    if GROUP == 0:
        total *= tl.load(scale_at).to(tl.float32)
    return total


@triton.jit
def _byte_expert_up_kernel(
    x, memory, bias, ids, out, size_out, size_in, x_stride,
    K: tl.constexpr, BLOCK_OUT: tl.constexpr, BLOCK: tl.constexpr, STEPS: tl.constexpr, GROUP: tl.constexpr,
    SHARE: tl.constexpr, ACTIVATION: tl.constexpr, BIAS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    pair = tl.program_id(0)
    own = tl.arange(0, 2 * BLOCK_OUT)  # a gate's line, then its up's
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    expert = tl.load(ids + pair).to(tl.int64)
    if expert < 0:
        return
    line = tl.minimum(tl.program_id(1) * BLOCK_OUT + own // 2, size_out - 1) + own % 2 * size_out
    row = x + (pair // K).to(tl.int64) * x_stride
    total = _byte_sums(row, memory, expert, line, size_in, 2 * BLOCK_OUT, BLOCK, STEPS, GROUP, SHARE)
    if BIAS:
        total += tl.load(bias + expert * (2 * size_out) + line)
    gate, up = halves(total, BLOCK_OUT, 1)
    feature = tl.program_id(1) * BLOCK_OUT + tl.arange(0, BLOCK_OUT)[:, None]
    result = activated(gate, up, ACTIVATION)
    tl.store(out + pair * size_out + feature, result.to(out.dtype.element_ty), mask=feature < size_out)


@triton.jit
def _byte_expert_down_kernel(
    x, memory, bias, chosen, out, size_out, size_in,
    K: tl.constexpr, BLOCK_OUT: tl.constexpr, BLOCK: tl.constexpr, STEPS: tl.constexpr, GROUP: tl.constexpr,
    SHARE: tl.constexpr, BIAS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    feature = tl.program_id(1) * BLOCK_OUT + tl.arange(0, BLOCK_OUT)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    line = tl.minimum(feature, size_out - 1)
    result = tl.zeros([BLOCK_OUT], tl.float32)
    for rank in tl.static_range(K):
        pair = row * K + rank
        expert = tl.load(chosen.ids_NK + pair).to(tl.int64)
        if expert >= 0:
            inputs = x + pair.to(tl.int64) * size_in
            total = _byte_sums(inputs, memory, expert, line, size_in, BLOCK_OUT, BLOCK, STEPS, GROUP, SHARE)
            if BIAS:
                total += tl.load(bias + expert * size_out + line)
            result += total * tl.load(chosen.weights_NK + pair)
    spot = out + row.to(tl.int64) * size_out + feature
    tl.store(spot, result.to(out.dtype.element_ty), mask=feature < size_out)


def byte_vector_up(
    x_NE: Tensor,
    weight: Arena,
    bias_XL: Tensor | None,
    chosen: Choices,
    out_PF: Tensor,
    activation: ExpertActivation,
    *,
    pdl: bool = False,
    how: ExpertVectorTiling = _TILING,
) -> None:
    """Compute activation(gate) * up of each pair, as `vector_up` of vector.py does.

    Args:
        x_NE: Input, bf16, last dimension contiguous.
        weight: Weights of all experts in codes of 8 bits; each has F gates, then F ups.
        bias_XL: Biases of the lines of each expert's weight, float32, contiguous, or None.
        chosen: Choices.
        out_PF: Output by pair, contiguous.
        activation: Activation of gates.
        pdl: Whether to use programmatic dependent launch.
        how: Division of the work.
    """
    (pairs, size_out), size_in = out_PF.shape, x_NE.shape[1]
    memory, group, share = memory_of(weight)
    block, outputs = min(how.block, triton.next_power_of_2(size_in)), how.outputs // 2
    _byte_expert_up_kernel[(pairs, triton.cdiv(size_out, outputs))](
        x_NE, memory, x_NE if bias_XL is None else bias_XL, chosen.ids_NK, out_PF, size_out, size_in, x_NE.stride(0),
        K=chosen.ids_NK.shape[1], BLOCK_OUT=outputs, BLOCK=block, STEPS=triton.cdiv(size_in, block), GROUP=group,
        SHARE=share, ACTIVATION=activation, BIAS=bias_XL is not None, PDL=pdl, num_warps=how.warps, launch_pdl=pdl,
    )  # fmt: skip


def byte_vector_down(
    x_PF: Tensor,
    weight: Arena,
    bias_XL: Tensor | None,
    chosen: Choices,
    out_NE: Tensor,
    *,
    pdl: bool = False,
    how: ExpertVectorTiling = _TILING,
) -> None:
    """Compute the weighted sum of the results of each token's experts, as `vector_down` of vector.py does.

    Args:
        x_PF: Input by pair, bf16, contiguous.
        weight: Weights of all experts in codes of 8 bits.
        bias_XL: Biases of the results of each expert, float32, contiguous, or None.
        chosen: Choices.
        out_NE: Output, contiguous.
        pdl: Whether to use programmatic dependent launch.
        how: Division of the work.
    """
    (rows, size_out), size_in = out_NE.shape, x_PF.shape[1]
    memory, group, share = memory_of(weight)
    block = min(how.block, triton.next_power_of_2(size_in))
    _byte_expert_down_kernel[(rows, triton.cdiv(size_out, how.outputs))](
        x_PF, memory, x_PF if bias_XL is None else bias_XL, chosen, out_NE, size_out, size_in,
        K=chosen.ids_NK.shape[1], BLOCK_OUT=how.outputs, BLOCK=block, STEPS=triton.cdiv(size_in, block), GROUP=group,
        SHARE=share, BIAS=bias_XL is not None, PDL=pdl, num_warps=how.warps, launch_pdl=pdl,
    )  # fmt: skip
