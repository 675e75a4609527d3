"""`route_few`: the experts of a few tokens on CUDA (Triton), from the router's input, in one launch.

A step of few tokens is a chain of short launches, each of which waits for the one before it: the fewer, the faster.
Every program computes the logits of one expert (logits.py), and the last of them to finish chooses for all tokens
(select.py). N tokens, X experts, E inputs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from headrace.ops.cuda.experts.logits import VECTOR_ROWS, VECTOR_WARPS, logits_of_expert, vector_steps
from headrace.ops.cuda.experts.select import constants_of, select

if TYPE_CHECKING:
    from torch import Tensor

    from headrace.ops.cuda.experts.choose import Choices
    from headrace.ops.cuda.experts.registry import ExpertWeights, Padding

__all__ = ["route_few"]


@triton.jit(do_not_specialize=["padding_row"])
def _route_few_kernel(
    x, router, bias, logits, finished, correction, scales, row_numbers, chosen, experts, size_in, plane, x_stride,
    padding_row, scale, margin,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, BLOCK: tl.constexpr, STEPS: tl.constexpr, BIAS: tl.constexpr,
    EXPERTS: tl.constexpr, K: tl.constexpr, RANKS: tl.constexpr, SCORE: tl.constexpr, RENORMALISE: tl.constexpr,
    CORRECT: tl.constexpr, SCALES: tl.constexpr, GROUPS: tl.constexpr, PADDED: tl.constexpr, TOP_GROUPS: tl.constexpr,
    TWO: tl.constexpr, PADDED_ROWS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    expert = tl.program_id(0)
    total = logits_of_expert(x, router, bias, expert, size_in, plane, x_stride, ROWS, COLUMNS, BLOCK, STEPS, BIAS, PDL)
    row = tl.arange(0, COLUMNS)
    tl.store(logits + row * experts + expert, total, mask=row < ROWS)
    tl.debug_barrier()
    if tl.atomic_add(finished, 1, sem="acq_rel", scope="gpu") == experts - 1:
        column = tl.arange(0, EXPERTS)
        inside = (row < ROWS)[:, None] & (column < experts)[None, :]
        spot = logits + row[:, None] * experts + column[None, :]
        logit = tl.load(spot, mask=inside, other=float("-inf"), cache_modifier=".cg")
        logit = tl.where((row < ROWS)[:, None], logit, 0.0)
        real = row < ROWS
        if PADDED_ROWS:
            real &= tl.load(row_numbers + row, mask=real, other=padding_row) != padding_row
        select(
            logit, real, correction, scales, chosen, row, ROWS, column, experts, scale, margin,
            COLUMNS, EXPERTS, K, RANKS, SCORE, RENORMALISE, CORRECT, SCALES, GROUPS, PADDED, TOP_GROUPS, TWO,
        )  # fmt: skip
        tl.store(finished, 0)


def route_few(
    x_NE: Tensor,
    weights: ExpertWeights,
    chosen: Choices,
    finished_1: Tensor,
    *,
    padding: Padding | None = None,
    pdl: bool = False,
) -> None:
    """Write the experts of each of up to `VECTOR_ROWS` tokens.

    Args:
        x_NE: Input of the router, bf16, last dimension contiguous.
        weights: The router and how it chooses.
        chosen: Output of the choices.
        finished_1: A zero, int32 [1], which launches leave as they found it.
        padding: Tokens that are given no experts; None where there are none.
        pdl: Whether to use programmatic dependent launch; the router's weight is then read before the wait.
    """
    router_3XE, routing = weights.router_3XE, weights.routing
    (rows, size_in), experts = x_NE.shape, routing.experts
    logits_NX = torch.empty(rows, experts, dtype=torch.float32, device=x_NE.device)
    block, steps = vector_steps(size_in)
    # What is not used is another tensor, which no kernel reads.
    bias, correction, scales = (
        logits_NX if each is None else each for each in (weights.router_bias_X, weights.correction_X, weights.scales_X)
    )
    _route_few_kernel[(experts,)](
        x_NE, router_3XE, bias, logits_NX, finished_1, correction, scales,
        chosen.ids_NK if padding is None else padding.rows_N, chosen,
        experts, size_in, router_3XE.stride(0), x_NE.stride(0), 0 if padding is None else padding.row,
        routing.scale, routing.margin,
        ROWS=rows, COLUMNS=VECTOR_ROWS, BLOCK=block, STEPS=steps, BIAS=weights.router_bias_X is not None,
        EXPERTS=triton.next_power_of_2(experts), CORRECT=weights.correction_X is not None,
        SCALES=weights.scales_X is not None, PADDED_ROWS=padding is not None, PDL=pdl,
        num_warps=VECTOR_WARPS, launch_pdl=pdl, **constants_of(routing),
    )  # fmt: skip
