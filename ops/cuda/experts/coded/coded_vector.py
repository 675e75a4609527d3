"""`coded_vector_up` and `coded_vector_down`: products of few tokens with experts' weights in codes on CUDA (Triton).

As vector.py, with the functions of products/coded_vector.py, which turn codes into numbers in registers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from headrace.ops.cuda.codes.numbers import line_scales, load_codes, memory_of
from headrace.ops.cuda.experts.activation import activated, halves
from headrace.ops.cuda.experts.memory import of_expert
from headrace.ops.cuda.products.coded_vector import TILINGS, sums_of

if TYPE_CHECKING:
    from torch import Tensor

    from headrace.ops.cuda.experts.arena import Arena
    from headrace.ops.cuda.experts.choose import Choices
    from headrace.ops.routing import ExpertActivation

__all__ = ["coded_vector_down", "coded_vector_up"]


@triton.jit
def _whole_sums(x, memory, line, chunks, BLOCK: tl.constexpr, STEPS: tl.constexpr, KIND: tl.constexpr):
    """Return the products of an input with some lines of a weight."""
    table = (memory.table + line // 8 * 16)[None, :, None]
    first = tl.arange(0, BLOCK)
    # Chunks come first, so that a thread has some chunks of all lines, and reads their inputs once.
    word, high, constants = load_codes(memory, line[None, :], first[:, None], chunks, (first < chunks)[:, None], KIND)
    total = tl.zeros(line.shape, tl.float32)
    for step in tl.static_range(STEPS):
        chunk = step * BLOCK + first
        if step + 1 < STEPS:
            after = chunk + BLOCK
            word_next, high_next, constants_next = load_codes(
                memory, line[None, :], after[:, None], chunks, (after < chunks)[:, None], KIND
            )
        total += sums_of(x, word, high, table, constants, chunk, chunks, memory.constant, KIND)
        if step + 1 < STEPS:
            word, high, constants = word_next, high_next, constants_next
    if KIND.codes == "fp8":
        total *= 1.152921504606846976e18
    elif KIND.codes == "fp4":
        total *= 9.223372036854775808e18
    return total * line_scales(memory, line, KIND)


@triton.jit
def _coded_expert_up_kernel(
    x, memory, pitches, bias, ids, out, size_out, chunks, x_stride,
    K: tl.constexpr, BLOCK_OUT: tl.constexpr, BLOCK: tl.constexpr, STEPS: tl.constexpr, KIND: tl.constexpr,
    ACTIVATION: tl.constexpr, BIAS: tl.constexpr, PDL: tl.constexpr,
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
    line = line.to(tl.int64)
    memory = of_expert(memory, pitches, expert)
    row = x + (pair // K).to(tl.int64) * x_stride
    total = _whole_sums(row, memory, line, chunks, BLOCK, STEPS, KIND)
    if BIAS:
        total += tl.load(bias + expert * (2 * size_out) + line)
    gate, up = halves(total, BLOCK_OUT, 1)
    feature = tl.program_id(1) * BLOCK_OUT + tl.arange(0, BLOCK_OUT)[:, None]
    result = activated(gate, up, ACTIVATION)
    tl.store(out + pair * size_out + feature, result.to(out.dtype.element_ty), mask=feature < size_out)


@triton.jit
def _coded_expert_down_kernel(
    x, memory, pitches, bias, chosen, out, size_out, chunks,
    K: tl.constexpr, BLOCK_OUT: tl.constexpr, BLOCK: tl.constexpr, STEPS: tl.constexpr, KIND: tl.constexpr,
    BIAS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    feature = tl.program_id(1) * BLOCK_OUT + tl.arange(0, BLOCK_OUT)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    result = tl.zeros([BLOCK_OUT], tl.float32)
    for rank in tl.static_range(K):
        pair = row * K + rank
        expert = tl.load(chosen.ids_NK + pair).to(tl.int64)
        if expert >= 0:
            line = tl.minimum(feature, size_out - 1).to(tl.int64)
            inputs = x + pair.to(tl.int64) * (chunks * (4 * KIND.pairs))
            total = _whole_sums(inputs, of_expert(memory, pitches, expert), line, chunks, BLOCK, STEPS, KIND)
            if BIAS:
                total += tl.load(bias + expert * size_out + line)
            result += total * tl.load(chosen.weights_NK + pair)
    spot = out + row.to(tl.int64) * size_out + feature
    tl.store(spot, result.to(out.dtype.element_ty), mask=feature < size_out)


def coded_vector_up(
    x_NE: Tensor,
    weight: Arena,
    bias_XL: Tensor | None,
    chosen: Choices,
    out_PF: Tensor,
    activation: ExpertActivation,
    *,
    pdl: bool = False,
) -> None:
    """Compute activation(gate) * up of each pair, as `vector_up` of vector.py does.

    Args:
        x_NE: Input, bf16, last dimension contiguous, at even addresses of 4 bytes.
        weight: Weights of all experts in codes; each has F gates, then F ups.
        bias_XL: Biases of the lines of each expert's weight, float32, contiguous, or None.
        chosen: Choices.
        out_PF: Output by pair, contiguous.
        activation: Activation of gates.
        pdl: Whether to use programmatic dependent launch.
    """
    (pairs, size_out), codes = out_PF.shape, weight.first
    assert not isinstance(codes, torch.Tensor)
    kind = codes.kind
    how, chunks = TILINGS[kind.bits], weight.shape[1] // kind.chunk
    block, outputs = min(how.block, triton.next_power_of_2(chunks)), how.lines // 2
    _coded_expert_up_kernel[(pairs, triton.cdiv(size_out, outputs))](
        x_NE.view(torch.int32), memory_of(codes), weight.pitch, x_NE if bias_XL is None else bias_XL, chosen.ids_NK,
        out_PF, size_out, chunks, x_NE.stride(0) // 2,
        K=chosen.ids_NK.shape[1], BLOCK_OUT=outputs, BLOCK=block, STEPS=triton.cdiv(chunks, block), KIND=kind,
        ACTIVATION=activation, BIAS=bias_XL is not None, PDL=pdl, num_warps=how.warps, launch_pdl=pdl,
    )  # fmt: skip


def coded_vector_down(
    x_PF: Tensor, weight: Arena, bias_XL: Tensor | None, chosen: Choices, out_NE: Tensor, *, pdl: bool = False
) -> None:
    """Compute the weighted sum of the results of each token's experts, as `vector_down` of vector.py does.

    Args:
        x_PF: Input by pair, bf16, contiguous.
        weight: Weights of all experts in codes.
        bias_XL: Biases of the results of each expert, float32, contiguous, or None.
        chosen: Choices.
        out_NE: Output, contiguous.
        pdl: Whether to use programmatic dependent launch.
    """
    (rows, size_out), codes = out_NE.shape, weight.first
    assert not isinstance(codes, torch.Tensor)
    kind = codes.kind
    how, chunks = TILINGS[kind.bits], weight.shape[1] // kind.chunk
    block = min(how.block, triton.next_power_of_2(chunks))
    _coded_expert_down_kernel[(rows, triton.cdiv(size_out, how.lines))](
        x_PF.view(torch.int32), memory_of(codes), weight.pitch, x_PF if bias_XL is None else bias_XL, chosen, out_NE,
        size_out, chunks,
        K=chosen.ids_NK.shape[1], BLOCK_OUT=how.lines, BLOCK=block, STEPS=triton.cdiv(chunks, block), KIND=kind,
        BIAS=bias_XL is not None, PDL=pdl, num_warps=how.warps, launch_pdl=pdl,
    )  # fmt: skip
