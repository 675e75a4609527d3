"""`byte_tile_products`: products in tiles with experts' weights in codes of 8 bits on CUDA (Triton), by tensor cores.

As tiles.py, with inputs in the order in which codes lie, and in the numbers that code_inputs.py makes of them. Where
these are 8-bit floats, too, tensor cores multiply codes by codes. Otherwise codes become the inputs' 16-bit floats on
their way from shared memory to the tensor cores, by the GPU's own conversion. Scales are applied to sums: of a line and
of a token at the end, of groups after each of them. Letters as in tiles.py; G groups.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from headrace.ops.cuda.codes.kinds import E4M3, INT8
from headrace.ops.cuda.experts.tiles import ExpertTiling, source_and_target, store_results

if TYPE_CHECKING:
    from torch import Tensor

    from headrace.ops.cuda.arch import Arch
    from headrace.ops.cuda.codes.kinds import Kind
    from headrace.ops.cuda.experts.arena import Arena
    from headrace.ops.cuda.experts.choose import Choices, Lists
    from headrace.ops.cuda.experts.coded.code_inputs import CodeInputs
    from headrace.ops.routing import ExpertActivation

__all__ = ["ByteMemory", "byte_tile_products", "byte_tiling", "memory_of", "takes_bytes"]

_BLOCK: Final = 128
"""Inputs of a step; a group has as many, or a multiple."""
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
def _byte_expert_tiles_kernel(
    x, factors, memory, bias, chosen, lists, out, size_out, size_in, x_stride, out_stride,
    K: tl.constexpr, ROWS: tl.constexpr, LINES: tl.constexpr, BLOCK: tl.constexpr, GROUP: tl.constexpr,
    SHARE: tl.constexpr, UP: tl.constexpr, ACTIVATION: tl.constexpr, BIAS: tl.constexpr, FACTORS: tl.constexpr,
    CODES: tl.constexpr, ORDERED: tl.constexpr, PDL: tl.constexpr,
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
        w = tl.load(w_at + start)
        if not CODES:
            w = w.to(tl.float32).to(x.dtype.element_ty)
        part = tl.load(x_at + start, mask=real[None, :], other=0.0)
        if GROUP == 0:
            # Tensor cores keep fewer bits of sums of 8-bit floats than float32 has, so that it adds them up.
            total = tl.dot(w, part, total, max_num_imprecise_acc=BLOCK if CODES else None)
        else:
            scale = tl.load(scale_at + start // GROUP * memory.group_pitch).to(tl.float32)
            total += tl.dot(w, part) * scale[:, None]
    if GROUP == 0:
        total *= tl.load(scale_at).to(tl.float32)[:, None]
    if FACTORS:
        total *= tl.load(factors + source, mask=real, other=0.0)[None, :]
    if BIAS:
        total += tl.load(bias + expert * (HALVES * size_out) + line)[:, None]
    store_results(total, factor, target, real, out, out_stride, size_out, OUT, ROWS, UP, ACTIVATION, 8 * ORDERED)


def byte_tile_products(
    x: CodeInputs,
    weight: Arena,
    bias_XL: Tensor | None,
    chosen: Choices,
    lists: Lists,
    out_PO: Tensor,
    how: ExpertTiling,
    *,
    activation: ExpertActivation | None = None,
    ordered: bool = False,
    pdl: bool = False,
) -> None:
    """Multiply by the weights of the chosen experts, as `tile_products` of tiles.py does.

    Args:
        x: Input.
        weight: Weights of all experts in codes that `takes_bytes` allows; each has O gates, then O ups, or O downs.
        bias_XL: Biases of the lines of each expert's weight, float32, contiguous, or None.
        chosen: Choices.
        lists: Lists of the choices.
        out_PO: Output, contiguous.
        how: Division of the work.
        activation: Activation of gates, or None.
        ordered: Whether outputs go to the places that the next weight's codes have.
        pdl: Whether to use programmatic dependent launch.
    """
    size_out, size_in, is_up = out_PO.shape[1], weight.shape[1], activation is not None
    memory, group, share = memory_of(weight)
    values, factors = x
    is_coded = values.dtype == torch.float8_e4m3fn
    if is_coded and memory.codes.dtype != values.dtype:
        raise ValueError("8-bit floats are multiplied by 8-bit floats alone")
    _byte_expert_tiles_kernel[(len(lists.tiles_T3), triton.cdiv(size_out, how.lines // (2 if is_up else 1)))](
        values, values if factors is None else factors, memory, values if bias_XL is None else bias_XL, chosen, lists,
        out_PO, size_out, size_in, values.stride(0), out_PO.stride(0),
        K=chosen.ids_NK.shape[1], ROWS=lists.rows, LINES=how.lines, BLOCK=how.block, GROUP=group, SHARE=share, UP=is_up,
        ACTIVATION=activation, BIAS=bias_XL is not None, FACTORS=factors is not None, CODES=is_coded, ORDERED=ordered,
        PDL=pdl, num_warps=how.warps, num_stages=how.stages, launch_pdl=pdl,
    )  # fmt: skip


def byte_tiling(rows: int, arch: Arch, *, coded: bool) -> ExpertTiling:
    """Return the division of a product with tiles of `rows` rows, with inputs in codes or not.

    With two warps Triton multiplies by mma.sync instead of wgmma, which converted codes reach by way of registers: it
    takes some 65 clocks for 16 inputs of 64 lines, longer than memory takes for them. On an H200 layers of
    Qwen3-30B-A3B gained a sixth to a third by these divisions; others have not been tried.
    """
    if coded:
        lines, warps = (128, 4) if rows <= 64 else (128, 8)
    else:
        lines, warps = (64, 2) if rows <= 32 else (64, 4) if rows <= 64 else (128, 8)
    stages = (arch.shared_bytes - _RESERVED) // (_BLOCK * (lines + (1 if coded else 2) * rows))
    return ExpertTiling(lines, _BLOCK, warps, min(_MOST_STAGES, stages))
