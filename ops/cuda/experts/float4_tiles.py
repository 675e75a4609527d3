"""`float4_tile_products`: products in tiles with experts' weights in MXFP4 on CUDA (Triton), by tensor cores.

As tiles.py, with inputs in the order in which codes lie (code_inputs.py). Triton's product of scaled numbers makes
bfloat16 of codes and scales, two at a time, on their way from shared memory to the tensor cores: that of the
dequantised weight, since scales are powers of two. Letters as in tiles.py.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from headrace.ops.cuda.codes.kinds import E2M1
from headrace.ops.cuda.experts.tiles import ExpertTiling, source_and_target, store_results

if TYPE_CHECKING:
    from torch import Tensor

    from headrace.ops.cuda.arch import Arch
    from headrace.ops.cuda.codes.kinds import Kind
    from headrace.ops.cuda.experts.arena import Arena
    from headrace.ops.cuda.experts.choose import Choices, Lists
    from headrace.ops.routing import ExpertActivation

__all__ = ["FLOAT4_ROWS", "FLOAT4_TILING", "float4_tile_products", "takes_float4"]

FLOAT4_ROWS: Final = 32
"""Most rows of a tile: more kept their sums outside registers on an H200, and took twice as long as coded_tiles.py."""
FLOAT4_TILING: Final = ExpertTiling(64, 128, 2, 4)
"""Division of a product, measured on an H200 with gpt-oss 20B's shapes."""

_GROUP: Final = tl.constexpr(32)
"""Inputs that share a scale."""
_CODES: Final = tl.constexpr("e2m1")
_NUMBERS: Final = tl.constexpr("bf16")
"""What a product of scaled numbers is told of its operands."""


def takes_float4(kind: Kind | None, shape: tuple[int, int], arch: Arch) -> bool:
    """Return whether these kernels multiply by such codes of a weight [O, I]: those of Hopper, the one GPU tried."""
    if kind is None or kind.codes != E2M1 or kind.scales != "e8m0" or not arch.has("wgmma"):
        return False
    return kind.group == _GROUP.value and not kind.ordered and shape[1] % _GROUP.value == 0


@triton.jit
def _scales(at, pitch, group, groups, WHOLE: tl.constexpr):
    """Return the scales of lines and groups, and 0 beyond the last group."""
    if WHOLE:
        found = tl.load(at + group[None, :] * pitch)
    else:
        found = tl.load(at + group[None, :] * pitch, mask=(group < groups)[None, :], other=0)
    return found


@triton.jit
def _float4_expert_tiles_kernel(
    x, codes, scales, code_pitch, scale_pitch, group_pitch, bias, chosen, lists, out, size_out, size_in, bytes_in,
    x_stride, out_stride,
    K: tl.constexpr, ROWS: tl.constexpr, LINES: tl.constexpr, BLOCK: tl.constexpr, UP: tl.constexpr,
    ACTIVATION: tl.constexpr, BIAS: tl.constexpr, WHOLE: tl.constexpr, BITS: tl.constexpr, PDL: tl.constexpr,
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
    byte = tl.arange(0, BLOCK // 2)
    group = tl.arange(0, BLOCK // _GROUP)
    w_at = codes + expert * code_pitch + line.to(tl.int64)[:, None] * bytes_in + byte[None, :]
    x_at = x + source[None, :] * x_stride + inner[:, None]
    scale_at = scales + expert * scale_pitch + line[:, None]
    total = tl.zeros([LINES, ROWS], tl.float32)
    scale = _scales(scale_at, group_pitch, group, size_in // _GROUP, WHOLE)
    for start in range(0, bytes_in, BLOCK // 2):
        # Scales are too narrow for copies to shared memory: they are read a step ahead.
        ahead = (2 * start + BLOCK) // _GROUP + group
        next_scale = _scales(scale_at, group_pitch, ahead, size_in // _GROUP, False)
        if WHOLE:
            w = tl.load(w_at + start)
            part = tl.load(x_at + 2 * start, mask=real[None, :], other=0.0)
        else:
            w = tl.load(w_at + start, mask=(start + byte < bytes_in)[None, :], other=0)
            part = tl.load(x_at + 2 * start, mask=(2 * start + inner < size_in)[:, None] & real[None, :], other=0.0)
        total = tl.dot_scaled(w, scale, _CODES, part, None, _NUMBERS, total, fast_math=True)
        scale = next_scale
    if BIAS:
        total += tl.load(bias + expert * (HALVES * size_out) + line)[:, None]
    store_results(total, factor, target, real, out, out_stride, size_out, OUT, ROWS, UP, ACTIVATION, BITS)


def float4_tile_products(
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
        x: Input, bf16, last dimension contiguous, in the order of codes of 4 bits.
        weight: Weights of all experts in codes that `takes_float4` allows; each has O gates, then O ups, or O downs.
        bias_XL: Biases of the lines of each expert's weight, float32, contiguous, or None.
        chosen: Choices.
        lists: Lists of the choices.
        out_PO: Output, contiguous; of gates and ups in the order of codes of 4 bits.
        how: Division of the work.
        activation: Activation of gates, or None.
        pdl: Whether to use programmatic dependent launch.
    """
    first, pitch = weight.first, weight.pitch
    assert not isinstance(first, torch.Tensor)
    assert not isinstance(pitch, int)
    size_out, size_in, is_up = out_PO.shape[1], weight.shape[1], activation is not None
    _float4_expert_tiles_kernel[(len(lists.tiles_T3), triton.cdiv(size_out, how.lines // (2 if is_up else 1)))](
        x, first.codes_OB, first.scales, pitch.words * 4, pitch.scales, first.scales.stride(0),
        x if bias_XL is None else bias_XL, chosen, lists, out_PO, size_out, size_in, size_in // 2,
        x.stride(0), out_PO.stride(0),
        K=chosen.ids_NK.shape[1], ROWS=lists.rows, LINES=how.lines, BLOCK=how.block, UP=is_up, ACTIVATION=activation,
        BIAS=bias_XL is not None, WHOLE=size_in % how.block == 0, BITS=4 if is_up else 0, PDL=pdl,
        num_warps=how.warps, num_stages=how.stages, launch_pdl=pdl,
    )  # fmt: skip
