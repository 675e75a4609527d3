"""`byte_tile_products`: products in tiles with experts' weights in codes of 8 bits on CUDA (Triton), by tensor cores.

As tiles.py, but codes become bfloat16 on their way from shared memory to the tensor cores, by the GPU's own conversion,
and scales are applied to sums: of a line at the end, of groups after each of them. Inputs come in the order in which
codes lie (codes/layout.py): `in_byte_order` brings those of tokens into it, and gates and ups leave their results in it
for downs. Letters as in tiles.py; G groups.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from headrace.ops.cuda.codes.kinds import E4M3, INT8
from headrace.ops.cuda.experts.memory import byte_of
from headrace.ops.cuda.experts.tiles import ExpertTiling, source_and_target, store_results

if TYPE_CHECKING:
    from torch import Tensor

    from headrace.ops.cuda.arch import Arch
    from headrace.ops.cuda.codes.kinds import Kind
    from headrace.ops.cuda.experts.arena import Arena
    from headrace.ops.cuda.experts.choose import Choices, Lists
    from headrace.ops.routing import ExpertActivation

__all__ = ["ByteMemory", "byte_tile_products", "byte_tiling", "in_byte_order", "memory_of", "takes_bytes"]

_BLOCK: Final = 128
"""Inputs of a step; a group has as many, or a multiple."""
_COPIED: Final = 1024
_MOST_STAGES: Final = 5
_RESERVED: Final = 8 << 10
"""Bytes of shared memory left for what a program needs besides its operands."""


def takes_bytes(kind: Kind | None, shape: tuple[int, int], arch: Arch) -> bool:
    """Return whether these kernels multiply by such codes of a weight [O, I]."""
    if kind is None or kind.codes not in (E4M3, INT8) or (kind.codes == E4M3 and not arch.has("fp8")):
        return False
    is_plain = not (kind.zeros or kind.minima or kind.ordered) and kind.scales in ("plain", "float32")
    return is_plain and kind.group % _BLOCK == 0 and shape[1] % _BLOCK == 0


class ByteMemory(NamedTuple):
    """Codes and scales of all experts as kernels read them; distances in elements."""

    codes: Tensor
    """Codes of the first expert as numbers, [O, I]."""
    scales: Tensor
    """Scales of the first expert, of outputs [O] or of groups [G, lines]."""
    pitch: int
    """Distance from an expert's codes to the next's."""
    scale_pitch: int
    """Distance from an expert's scales to the next's."""
    group_pitch: int
    """Distance from a group's scales to the next's."""


def memory_of(weight: Arena) -> tuple[ByteMemory, int, int]:
    """Return where codes and scales lie, the inputs of a group (0 for all), and the outputs that share a scale."""
    codes, pitch = weight.first, weight.pitch
    assert not isinstance(codes, torch.Tensor)
    assert not isinstance(pitch, int)
    kind = codes.kind
    values = codes.codes_OB.view(torch.float8_e4m3fn if kind.codes == E4M3 else torch.int8)
    memory = ByteMemory(
        values, codes.scales, pitch.words * 4, pitch.scales, codes.scales.stride(0) if kind.group else 0
    )
    return memory, kind.group, kind.share if kind.group else 1


@triton.jit
def _byte_order_kernel(x, out, size, x_stride, BLOCK: tl.constexpr, PDL: tl.constexpr):
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    value = tl.load(x + row * x_stride + at, mask=at < size, other=0.0)
    tl.store(out + row * size + byte_of(at), value, mask=at < size)


def in_byte_order(x_NE: Tensor, *, pdl: bool = False) -> Tensor:
    """Return inputs in the order in which codes of 8 bits lie.

    Args:
        x_NE: Input, last dimension contiguous.
        pdl: Whether to use programmatic dependent launch.
    """
    out_NE = torch.empty_like(x_NE, memory_format=torch.contiguous_format)
    (rows, size), block = x_NE.shape, min(_COPIED, triton.next_power_of_2(x_NE.shape[1]))
    _byte_order_kernel[(rows, triton.cdiv(size, block))](
        x_NE, out_NE, size, x_NE.stride(0), BLOCK=block, PDL=pdl, num_warps=4, launch_pdl=pdl
    )
    return out_NE


@triton.jit
def _byte_expert_tiles_kernel(
    x, memory, bias, chosen, lists, out, size_out, size_in, x_stride, out_stride,
    K: tl.constexpr, ROWS: tl.constexpr, LINES: tl.constexpr, BLOCK: tl.constexpr, GROUP: tl.constexpr,
    SHARE: tl.constexpr, UP: tl.constexpr, ACTIVATION: tl.constexpr, BIAS: tl.constexpr, PDL: tl.constexpr,
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
    w_at = memory.codes + expert * memory.pitch + line.to(tl.int64)[:, None] * size_in + inner[None, :]
    x_at = x + source[None, :] * x_stride + inner[:, None]
    scale_at = memory.scales + expert * memory.scale_pitch + line // SHARE
    total = tl.zeros([LINES, ROWS], tl.float32)
    for start in range(0, size_in, BLOCK):
        w = tl.load(w_at + start).to(tl.float32).to(x.dtype.element_ty)
        part = tl.load(x_at + start, mask=real[None, :], other=0.0)
        if GROUP == 0:
            total = tl.dot(w, part, total)
        else:
            scale = tl.load(scale_at + start // GROUP * memory.group_pitch).to(tl.float32)
            total += tl.dot(w, part) * scale[:, None]
    if GROUP == 0:
        total *= tl.load(scale_at).to(tl.float32)[:, None]
    if BIAS:
        total += tl.load(bias + expert * (HALVES * size_out) + line)[:, None]
    store_results(total, factor, target, real, out, out_stride, size_out, OUT, ROWS, UP, ACTIVATION, ORDERED=UP)


def byte_tile_products(
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
    """Multiply by the weights of the chosen experts, as `tile_products` of tiles.py does.

    Args:
        x: Input, bf16, last dimension contiguous, in the order of the codes.
        weight: Weights of all experts in codes that `takes_bytes` allows; each has O gates, then O ups, or O downs.
        bias_XL: Biases of the lines of each expert's weight, float32, contiguous, or None.
        chosen: Choices.
        lists: Lists of the choices.
        out_PO: Output, contiguous; of gates and ups in the order of the codes.
        how: Division of the work.
        activation: Activation of gates, or None.
        pdl: Whether to use programmatic dependent launch.
    """
    size_out, size_in, is_up = out_PO.shape[1], weight.shape[1], activation is not None
    memory, group, share = memory_of(weight)
    _byte_expert_tiles_kernel[(len(lists.tiles_T3), triton.cdiv(size_out, how.lines // (2 if is_up else 1)))](
        x, memory, x if bias_XL is None else bias_XL, chosen, lists, out_PO, size_out, size_in, x.stride(0),
        out_PO.stride(0),
        K=chosen.ids_NK.shape[1], ROWS=lists.rows, LINES=how.lines, BLOCK=how.block, GROUP=group, SHARE=share, UP=is_up,
        ACTIVATION=activation, BIAS=bias_XL is not None, PDL=pdl,
        num_warps=how.warps, num_stages=how.stages, launch_pdl=pdl,
    )  # fmt: skip


def byte_tiling(rows: int, arch: Arch) -> ExpertTiling:
    """Return the division of a product with tiles of `rows` rows; not measured."""
    lines, warps = (64, 4) if rows <= 64 else (128, 8)
    stages = (arch.shared_bytes - _RESERVED) // (_BLOCK * (lines + 2 * rows))
    return ExpertTiling(lines, _BLOCK, warps, min(_MOST_STAGES, stages))
