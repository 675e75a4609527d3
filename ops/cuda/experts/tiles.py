"""`tile_products`: products with the weights of chosen experts on CUDA (Triton), by tensor cores.

A program multiplies some outputs of one expert by a tile of its tokens, which a list made on the device names
(choose.py), so that weights of experts that nobody chose are not read, and those of others once for each tile. Grids
are as large as the longest list, and programs beyond the list end at once. A sum is in one order whatever the tile, so
that a token's results do not depend on the others. P pairs of a token and an expert, I inputs and O outputs of a
product; other letters as in choose.py.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from headrace.ops.cuda.experts.activation import activated, halves
from headrace.ops.cuda.experts.memory import place_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from headrace.ops.cuda.arch import Arch
    from headrace.ops.cuda.experts.arena import Arena
    from headrace.ops.cuda.experts.choose import Choices, Lists
    from headrace.ops.routing import ExpertActivation

__all__ = ["ExpertTiling", "source_and_target", "store_results", "tile_products", "tile_rows", "tiling"]


class ExpertTiling(NamedTuple):
    """The work of a program; sizes are powers of two."""

    lines: int
    """Lines of a weight, gates and ups included."""
    block: int
    """Inputs of a step."""
    warps: int
    stages: int
    """Steps whose operands are in shared memory at once."""


_MOST_STAGES: Final = 4
_RESERVED: Final = 4 << 10
"""Bytes of shared memory left for what a program needs besides its operands."""


@triton.jit
def source_and_target(chosen, lists, tile, K: tl.constexpr, ROWS: tl.constexpr, UP: tl.constexpr):
    """Return a tile's expert, which of its rows there are, whose input they have, where results go, and their factors.

    Gates and ups read the inputs of tokens, and leave their results at the places of the list; downs read these, and
    leave theirs, times the weights, at the pairs.
    """
    expert = tl.load(lists.tiles_T3 + tile * 3).to(tl.int64)
    place = tl.load(lists.tiles_T3 + tile * 3 + 1) + tl.arange(0, ROWS)
    real = tl.arange(0, ROWS) < tl.load(lists.tiles_T3 + tile * 3 + 2)
    pair = tl.load(lists.pairs_P + place, mask=real, other=0)
    if UP:
        return expert, real, (pair // K).to(tl.int64), place.to(tl.int64), pair.to(tl.float32)
    factor = tl.load(chosen.weights_NK + pair, mask=real, other=0.0)
    return expert, real, place.to(tl.int64), pair.to(tl.int64), factor


@triton.jit
def store_results(
    total, factor, target, real, out, out_stride, size_out,
    OUT: tl.constexpr, ROWS: tl.constexpr, UP: tl.constexpr, ACTIVATION: tl.constexpr, BITS: tl.constexpr = 0,
):  # fmt: skip
    """Store the sums [lines, rows] of a tile: gates and ups with their activation, downs with their factors.

    With BITS, outputs go to the places that the next weight's codes of so many bits have.
    """
    if UP:
        gate, up = halves(total, OUT, ROWS)
        total = activated(gate, up, ACTIVATION)
    else:
        total *= factor[None, :]
    feature = tl.program_id(1) * OUT + tl.arange(0, OUT)
    place = feature if BITS == 0 else place_of(feature, BITS)
    spot = out + target[None, :] * out_stride + place[:, None]
    tl.store(spot, total.to(out.dtype.element_ty), mask=(feature < size_out)[:, None] & real[None, :])


@triton.jit
def _expert_tiles_kernel(
    x, weight, bias, chosen, lists, out, pitch, size_out, size_in, x_stride, out_stride,
    K: tl.constexpr, ROWS: tl.constexpr, LINES: tl.constexpr, BLOCK: tl.constexpr, UP: tl.constexpr,
    ACTIVATION: tl.constexpr, BIAS: tl.constexpr, WHOLE: tl.constexpr, PDL: tl.constexpr,
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
    inner = tl.arange(0, BLOCK)
    w_at = weight + expert * pitch + line.to(tl.int64)[:, None] * size_in + inner[None, :]
    x_at = x + source[None, :] * x_stride + inner[:, None]
    total = tl.zeros([LINES, ROWS], tl.float32)
    for start in range(0, size_in, BLOCK):
        if WHOLE:
            w = tl.load(w_at + start)
            part = tl.load(x_at + start, mask=real[None, :], other=0.0)
        else:
            inside = start + inner < size_in
            w = tl.load(w_at + start, mask=inside[None, :], other=0.0)
            part = tl.load(x_at + start, mask=inside[:, None] & real[None, :], other=0.0)
        total = tl.dot(w, part, total)
    if BIAS:
        total += tl.load(bias + expert * (HALVES * size_out) + line)[:, None]
    store_results(total, factor, target, real, out, out_stride, size_out, OUT, ROWS, UP, ACTIVATION)


def tile_products(
    x: Tensor,
    weight: Arena,
    bias_XL: Tensor | None,
    chosen: Choices,
    lists: Lists,
    out_PO: Tensor,
    how: ExpertTiling,
    *,
    activation: ExpertActivation | None = None,
    pdl: bool = False,
) -> None:
    """Multiply by the weights of the chosen experts: by gates and ups with an `activation`, else by downs.

    Args:
        x: Input, bf16, last dimension contiguous: of tokens [N, I], or for downs of places [P, I].
        weight: Weights of all experts, dense; each has O gates, then O ups, or O downs.
        bias_XL: Biases of the lines of each expert's weight, float32, contiguous, or None.
        chosen: Choices.
        lists: Lists of the choices.
        out_PO: Output, contiguous: activation(gate) * up at places, or for downs results times their weights at pairs.
        how: Division of the work.
        activation: Activation of gates, or None.
        pdl: Whether to use programmatic dependent launch.
    """
    size_out, size_in = out_PO.shape[1], weight.shape[1]
    is_up = activation is not None
    _expert_tiles_kernel[(len(lists.tiles_T3), triton.cdiv(size_out, how.lines // (2 if is_up else 1)))](
        x, weight.first, x if bias_XL is None else bias_XL, chosen, lists, out_PO, weight.pitch, size_out, size_in,
        x.stride(0), out_PO.stride(0),
        K=chosen.ids_NK.shape[1], ROWS=lists.rows, LINES=how.lines, BLOCK=how.block, UP=is_up, ACTIVATION=activation,
        BIAS=bias_XL is not None, WHOLE=size_in % how.block == 0, PDL=pdl,
        num_warps=how.warps, num_stages=how.stages, launch_pdl=pdl,
    )  # fmt: skip


def tile_rows(pairs: int, experts: int, table: Sequence[tuple[int, int]]) -> int:
    """Return the rows of a tile by the tokens that an expert has on average: those behind the first number as large."""
    return next(rows for most, rows in table if pairs <= most * experts)


def tiling(rows: int, arch: Arch) -> ExpertTiling:
    """Return the division of a product with tiles of `rows` rows; measured on an H200."""
    lines, block, warps = (64, 128, 4) if rows <= 32 else (128, 64, 4) if rows <= 64 else (256, 64, 8)
    room = arch.shared_bytes - _RESERVED
    if 2 * 2 * block * (lines + rows) > room:
        lines //= 2
    return ExpertTiling(lines, block, warps, min(_MOST_STAGES, room // (2 * block * (lines + rows))))
