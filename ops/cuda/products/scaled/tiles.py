"""`scaled_tiles_linear`: products of many rows of 8-bit floats by 8-bit floats, with scales of groups (Triton).

Both operands have scales of groups of inputs. Tensor cores add up a group's products, of whose sums they keep fewer
bits than float32 has, and groups are added in float32 in a fixed order: results do not vary from run to run. I input
features, O output features, N rows.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from headrace.ops.cuda.products.scaled.inputs import GROUP

if TYPE_CHECKING:
    from torch import Tensor

    from headrace.ops.cuda.arch import Arch
    from headrace.ops.cuda.codes.layout import Codes
    from headrace.ops.cuda.products.scaled.inputs import GroupCodes

__all__ = ["ScaledTiling", "scaled_tiles_linear", "scaled_tiling"]

_BAND: Final = 8
"""Tiles one below the other that are computed before those beside them."""
_FEW_ROWS: Final = 512
"""Most rows for tiles of 64, which are more."""
_LARGE_BLOCK: Final = 160 << 10
"""Shared memory of a block from which tiles have 128 rows."""
_RESERVED: Final = 8 << 10
"""Bytes of shared memory left for what a program needs besides its operands."""
_MOST_STAGES: Final = 4


class ScaledTiling(NamedTuple):
    """The work of a program: rows and lines of a tile, its warps, and steps of which operands are fetched ahead."""

    rows: int
    lines: int
    warps: int
    stages: int


@triton.jit(do_not_specialize=["rows"])
def _scaled_tiles_kernel(
    x, x_scales, codes, scales, out, rows, size_out, size_in, x_pitch, pitch, out_stride,
    ROWS: tl.constexpr, LINES: tl.constexpr, BLOCK: tl.constexpr, BAND: tl.constexpr, SHARE: tl.constexpr,
    WHOLE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    tile = tl.program_id(0)
    of_band = BAND * tl.cdiv(size_out, LINES)
    first = tile // of_band * BAND
    height = tl.minimum(BAND, tl.cdiv(rows, ROWS) - first)
    row = (first + tile % of_band % height) * ROWS + tl.arange(0, ROWS)
    line = tile % of_band // height * LINES + tl.arange(0, LINES)
    real_row = tl.minimum(row, rows - 1)
    real_line = tl.minimum(line, size_out - 1)
    inner = tl.arange(0, BLOCK)
    x_at = x + real_row.to(tl.int64)[:, None] * size_in + inner[None, :]
    w_at = codes + real_line.to(tl.int64)[None, :] * size_in + inner[:, None]
    x_scale_at = x_scales + real_row
    scale_at = scales + real_line // SHARE
    total = tl.zeros([ROWS, LINES], tl.float32)
    for start in range(0, size_in, BLOCK):
        if WHOLE:
            part = tl.load(x_at + start)
            w = tl.load(w_at + start)
        else:
            inside = inner < size_in - start
            part = tl.load(x_at + start, mask=inside[None, :], other=0.0)
            w = tl.load(w_at + start, mask=inside[:, None], other=0.0)
        x_scale = tl.load(x_scale_at + start // BLOCK * x_pitch)
        scale = tl.load(scale_at + start // BLOCK * pitch)
        total += tl.dot(part, w) * (x_scale[:, None] * scale[None, :])
    target = out + row.to(tl.int64)[:, None] * out_stride + line[None, :]
    tl.store(target, total.to(out.dtype.element_ty), mask=(row < rows)[:, None] & (line < size_out)[None, :])


def scaled_tiles_linear(x: GroupCodes, weight: Codes, out_NO: Tensor, how: ScaledTiling, *, pdl: bool = False) -> None:
    """Compute `out = x W^T`, in float32 until it is rounded once.

    Args:
        x: Input, I a multiple of 16.
        weight: Weight [O, I] in 8-bit floats with scales of `GROUP` inputs.
        out_NO: Output in any float dtype, last dimension contiguous.
        how: Division of the work.
        pdl: Whether to use programmatic dependent launch, in which nothing is read before the wait.
    """
    rows, size_in, size_out = len(out_NO), x.codes_NI.shape[1], len(weight.codes_OB)
    _scaled_tiles_kernel[(triton.cdiv(rows, how.rows) * triton.cdiv(size_out, how.lines),)](
        x.codes_NI, x.scales_GN, weight.codes_OB.view(torch.float8_e4m3fn), weight.scales, out_NO, rows, size_out,
        size_in, x.scales_GN.stride(0), weight.scales.stride(0), out_NO.stride(0),
        ROWS=how.rows, LINES=how.lines, BLOCK=GROUP, BAND=_BAND, SHARE=weight.kind.share, WHOLE=size_in % GROUP == 0,
        PDL=pdl, num_warps=how.warps, num_stages=how.stages, launch_pdl=pdl,
    )  # fmt: skip


def scaled_tiling(rows: int, arch: Arch) -> ScaledTiling:
    """Return the division of a product of `rows` rows; not measured."""
    is_large = rows > _FEW_ROWS and arch.shared_bytes >= _LARGE_BLOCK
    of_rows, warps = (128, 8) if is_large else (64, 4)
    stages = (arch.shared_bytes - _RESERVED) // (GROUP * (of_rows + 128))
    return ScaledTiling(of_rows, 128, warps, min(_MOST_STAGES, stages))
