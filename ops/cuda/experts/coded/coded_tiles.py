"""`coded_tile_products`: products in tiles with experts' weights in codes on CUDA (Triton), by tensor cores.

As tiles.py, but codes become the bfloat16 of the dequantised weight in registers (products/coded_tiles.py). Letters as
in tiles.py.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from headrace.ops.cuda.codes.numbers import line_scales, load_codes, memory_of
from headrace.ops.cuda.experts.memory import of_expert
from headrace.ops.cuda.experts.tiles import source_and_target, store_results
from headrace.ops.cuda.products.coded_tiles import multiplied

if TYPE_CHECKING:
    from torch import Tensor

    from headrace.ops.cuda.experts.arena import Arena
    from headrace.ops.cuda.experts.choose import Choices, Lists
    from headrace.ops.routing import ExpertActivation

__all__ = ["MOST_ROWS", "coded_tile_products"]

MOST_ROWS = 64
"""Most rows of a tile: with more, codes and sums together do not fit the registers."""
_LINES, _WARPS = 64, 4
_BLOCKS = {16: 16, 32: 16, 64: 8}
"""Chunks of a line that are read at once, by the rows of a tile."""


@triton.jit
def _coded_expert_tiles_kernel(
    x, memory, pitches, bias, chosen, lists, out, size_out, chunks, x_stride, out_stride,
    K: tl.constexpr, ROWS: tl.constexpr, LINES: tl.constexpr, BLOCK: tl.constexpr, STEPS: tl.constexpr,
    KIND: tl.constexpr, UP: tl.constexpr, ACTIVATION: tl.constexpr, BIAS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    HALVES: tl.constexpr = 2 if UP else 1  # a gate's line, then its up's
    OUT: tl.constexpr = LINES // HALVES
    tile = tl.program_id(0)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    if tile >= tl.load(lists.ends_2):
        return
    expert, real, source, target, factor = source_and_target(chosen, lists, tile, K, ROWS, UP)
    own = tl.arange(0, LINES)
    line = tl.minimum(tl.program_id(1) * OUT + own // HALVES, size_out - 1) + own % HALVES * size_out
    line = line.to(tl.int64)
    bias += expert * (HALVES * size_out)
    memory = of_expert(memory, pitches, expert)
    table = (memory.table + line // 8 * 16)[:, None, None]
    each = tl.arange(0, BLOCK)
    x_rows = x + source[None, :] * x_stride
    word, high, constants = load_codes(memory, line[:, None], each[None, :], chunks, (each < chunks)[None, :], KIND)
    total = tl.zeros([LINES, ROWS], tl.float32)
    for step in range(STEPS):
        chunk = step * BLOCK
        ahead = chunk + BLOCK + each
        word_next, high_next, constants_next = load_codes(
            memory, line[:, None], ahead[None, :], chunks, (ahead < chunks)[None, :], KIND
        )
        total = multiplied(
            x_rows, word, high, table, constants, chunk, chunks, real[None, :], memory.constant, total, LINES, BLOCK,
            KIND,
        )  # fmt: skip
        word, high, constants = word_next, high_next, constants_next
    total *= line_scales(memory, line, KIND)[:, None]
    if BIAS:
        total += tl.load(bias + line)[:, None]
    store_results(total, factor, target, real, out, out_stride, size_out, OUT, ROWS, UP, ACTIVATION)


def coded_tile_products(
    x: Tensor,
    weight: Arena,
    bias_XL: Tensor | None,
    chosen: Choices,
    lists: Lists,
    out_PO: Tensor,
    *,
    activation: ExpertActivation | None = None,
    pdl: bool = False,
) -> None:
    """Multiply by the weights of the chosen experts, as `tile_products` of tiles.py does.

    Args:
        x: Input, bf16, last dimension contiguous, at even addresses of 4 bytes.
        weight: Weights of all experts in codes; each has O gates, then O ups, or O downs.
        bias_XL: Biases of the lines of each expert's weight, float32, contiguous, or None.
        chosen: Choices.
        lists: Lists of the choices, in tiles of at most `MOST_ROWS` rows.
        out_PO: Output, contiguous.
        activation: Activation of gates, or None.
        pdl: Whether to use programmatic dependent launch.
    """
    codes, size_out = weight.first, out_PO.shape[1]
    assert not isinstance(codes, torch.Tensor)
    kind = codes.kind
    is_up = activation is not None
    chunks, block = weight.shape[1] // kind.chunk, _BLOCKS[lists.rows]
    _coded_expert_tiles_kernel[(len(lists.tiles_T3), triton.cdiv(size_out, _LINES // (2 if is_up else 1)))](
        x.view(torch.int32), memory_of(codes), weight.pitch, x if bias_XL is None else bias_XL, chosen, lists, out_PO,
        size_out, chunks, x.stride(0) // 2, out_PO.stride(0),
        K=chosen.ids_NK.shape[1], ROWS=lists.rows, LINES=_LINES, BLOCK=block, STEPS=triton.cdiv(chunks, block),
        KIND=kind, UP=is_up, ACTIVATION=activation, BIAS=bias_XL is not None, PDL=pdl,
        num_warps=_WARPS, num_stages=1, launch_pdl=pdl,
    )  # fmt: skip
