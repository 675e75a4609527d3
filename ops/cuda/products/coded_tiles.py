"""Products of 2 to 64 rows with weights in codes on CUDA (Triton), by tensor cores; the activation may be inside.

Codes become the bfloat16 of the dequantised weight in registers, and a weight is read once. Two columns lie 16 bits
apart in a word, so that tiles of words make two products, of even inputs and of odd ones, for each pair of a word. A
program loads its next codes while it multiplies, and its first ones before it waits for the kernel that makes its input
(programmatic dependent launch). Sums over splits of the inner dimension are in a fixed order: results do not vary from
run to run. I input features, O output features, N rows.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from headrace.ops.cuda.codes.numbers import line_scales, load_codes, memory_of, numbers_of
from headrace.ops.cuda.products.split_sums import store_sums

if TYPE_CHECKING:
    from torch import Tensor

    from headrace.ops.cuda.codes.layout import Codes
    from headrace.ops.cuda.products.linear import LinearScratch

__all__ = ["MAX_ROWS", "TileTiling", "coded_tiles_linear", "multiplied", "tile_tiling"]

MAX_ROWS = 64
_FEWEST_ROWS = 16
"""Rows of the smallest tile of tensor cores."""
_LINES = 64
_MOST_SPLITS = 8


class TileTiling(NamedTuple):
    """The work of a program; sizes are powers of two."""

    block: int
    """Chunks of 16 bytes of a line that are read at once, at least 4."""
    lines: int
    """Lines of the weight, gates and ups included."""
    splits: int
    """Splits of the inner dimension."""
    warps: int


@triton.jit
def multiplied(
    x_rows, word, high, table, constants, chunk, last, real, constant, total,
    LINES: tl.constexpr, BLOCK: tl.constexpr, KIND: tl.constexpr,
):  # fmt: skip
    """Return the sums [lines, rows] with the products of some chunks of all lines added."""
    PAIRS: tl.constexpr = KIND.pairs
    four = tl.arange(0, 4)
    place = tl.arange(0, 4 * BLOCK)  # of a word in the tile's lines
    inside = (chunk + place // 4 < last)[:, None] & real
    for pair in tl.static_range(PAIRS):
        at = (chunk + place // 4) * (4 * PAIRS) + place % 4 + 4 * pair
        both = tl.load(x_rows + at[:, None], mask=inside, other=0)
        x_low = both.to(tl.int16).to(tl.bfloat16, bitcast=True)
        x_high = (both >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True)
        scale, offset = constants[pair * KIND.parts // PAIRS]
        of_words = (scale[:, :, None], offset[:, :, None])
        number = 4 * pair + four[None, None, :]
        low, up = numbers_of(word, high, table, number, constant, of_words, pair, KIND)
        # Rounded last: for sm_100 Triton 3.6 fails to compile a product of what has just been reshaped.
        total = tl.dot(low.reshape(LINES, 4 * BLOCK).to(tl.bfloat16), x_low, total)
        total = tl.dot(up.reshape(LINES, 4 * BLOCK).to(tl.bfloat16), x_high, total)
    return total


@triton.jit(do_not_specialize=["rows"])
def _coded_tiles_kernel(
    x, memory, out, planes, counters, rows, size_out, chunks, x_stride, out_stride,
    ROWS: tl.constexpr, LINES: tl.constexpr, BLOCK: tl.constexpr, STEPS: tl.constexpr, SPLITS: tl.constexpr,
    KIND: tl.constexpr, GATED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    HALVES: tl.constexpr = 2 if GATED else 1  # a gate's line, then its up's
    OUT: tl.constexpr = LINES // HALVES
    tile = tl.program_id(0)
    split = tl.program_id(1)
    own = tl.arange(0, LINES)
    line = tl.minimum(tile * OUT + own // HALVES, size_out - 1).to(tl.int64) + own % HALVES * size_out
    table = (memory.table + line // 8 * 16)[:, None, None]
    each = tl.arange(0, BLOCK)
    first = split * (STEPS * BLOCK)
    last = tl.minimum(first + STEPS * BLOCK, chunks)
    ahead = first + each
    word, high, constants = load_codes(memory, line[:, None], ahead[None, :], chunks, (ahead < last)[None, :], KIND)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.arange(0, ROWS)
    real = (row < rows)[None, :]  # padding rows are not read, since all programs would queue for one line
    x_rows = x + row.to(tl.int64)[None, :] * x_stride
    total = tl.zeros([LINES, ROWS], tl.float32)
    for step in range(STEPS):
        chunk = first + step * BLOCK
        ahead = chunk + BLOCK + each
        word_next, high_next, constants_next = load_codes(
            memory, line[:, None], ahead[None, :], chunks, (ahead < last)[None, :], KIND
        )
        total = multiplied(
            x_rows, word, high, table, constants, chunk, last, real, memory.constant, total, LINES, BLOCK, KIND
        )
        word, high, constants = word_next, high_next, constants_next
    total *= line_scales(memory, line, KIND)[:, None]
    if GATED:
        gate, up = total.reshape(OUT, 2, ROWS).permute(0, 2, 1).split()
        total = gate * tl.sigmoid(gate) * up
    feature = tile * OUT + tl.arange(0, OUT)
    target = out + row.to(tl.int64)[None, :] * out_stride + feature[:, None]
    store_sums(total, target, (feature < size_out)[:, None] & real, planes, counters, tile, split, OUT, ROWS, SPLITS)


def coded_tiles_linear(
    x_NI: Tensor,
    weight: Codes,
    out_NO: Tensor,
    scratch: LinearScratch,
    *,
    gated: bool = False,
    pdl: bool = False,
    how: TileTiling | None = None,
) -> None:
    """Compute `out = x W^T` for at most `MAX_ROWS` rows, accumulated in float32.

    Args:
        x_NI: Input, bf16, last dimension contiguous, at even addresses of 4 bytes.
        weight: Weight [O, I] in codes. With `gated`, O gate rows, then O up rows.
        out_NO: Output in any float dtype, last dimension contiguous; must not overlap the input.
        scratch: The scratch of the current stream.
        gated: Whether to compute `out = silu(gate) * up`, of gates and ups in float32.
        pdl: Whether to use programmatic dependent launch; coded.py declares what is then read before the wait.
        how: Division of the work; None for that of `tile_tiling`.

    Raises:
        ValueError: Too many rows.
    """
    rows, kind = len(x_NI), weight.kind
    if rows > MAX_ROWS:
        raise ValueError(f"{rows} rows: at most {MAX_ROWS}")
    how = how or tile_tiling(weight, rows, scratch.arch.tuning.coded_tile_programs, gated=gated)
    halves = 2 if gated else 1
    size_out, chunks = weight.shape[0] // halves, weight.shape[1] // kind.chunk
    _coded_tiles_kernel[(triton.cdiv(size_out, how.lines // halves), how.splits)](
        x_NI.view(torch.int32), memory_of(weight), out_NO, scratch.planes, scratch.counters, rows, size_out, chunks,
        x_NI.stride(0) // 2, out_NO.stride(0),
        ROWS=max(_FEWEST_ROWS, triton.next_power_of_2(rows)), LINES=how.lines, BLOCK=how.block,
        STEPS=triton.cdiv(chunks, how.block * how.splits), SPLITS=how.splits, KIND=kind, GATED=gated, PDL=pdl,
        num_warps=how.warps, num_stages=1, launch_pdl=pdl,
    )  # fmt: skip


def tile_tiling(weight: Codes, rows: int, programs: int, *, gated: bool) -> TileTiling:
    """Return the division of a product: the inner dimension is split until there are `programs` programs.

    It is not split for an activation, or into less than two steps of a program.
    """
    lines, chunks = weight.shape[0], weight.shape[1] // weight.kind.chunk
    few = 16 if weight.kind.bits == 8 else 8
    block, splits = few if rows <= 2 * _FEWEST_ROWS else 4, 1
    while (
        not gated
        and splits < _MOST_SPLITS
        and splits * triton.cdiv(lines, _LINES) < programs
        and chunks >= 4 * splits * block
    ):
        splits *= 2
    return TileTiling(block, _LINES, splits, 4)
