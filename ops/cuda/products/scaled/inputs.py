"""`to_codes` and `to_codes_of_groups`: round activations to 8-bit floats (Triton), for products of many rows.

I input features, G groups of `GROUP` of them, O output features, L blocks of 128 of them, N rows.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from headrace.ops.cuda.codes.kinds import LINES_OF_SCALE

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["GROUP", "GroupCodes", "to_codes", "to_codes_of_groups"]

GROUP: Final = 128
"""Inputs that share a scale in `to_codes_of_groups`."""
_ROWS: Final = 4
"""Rows to whose multiple codes are padded: cuBLAS reads scales in pieces of 16 bytes."""
_GROUPS: Final = 16
"""Groups of a program."""
_LINES: Final = tl.constexpr(128)
"""Outputs of a block, and blocks whose scales a program copies at once."""


class GroupCodes(NamedTuple):
    """Activations as 8-bit floats times scales of their groups; rows up to a multiple of 4, the last undefined."""

    codes_NI: Tensor
    """8-bit floats (e4m3), contiguous, in the order of a weight's codes."""
    scales_GN: Tensor
    """Scales, float32, contiguous."""
    blocks_LG: Tensor
    """Scales of a weight's blocks, float32, contiguous; as large as the argument says, if there is one."""


@triton.jit
def _to_codes_kernel(x, codes, scales, size_in, x_stride, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    value = tl.load(x + row * x_stride + column, mask=column < size_in, other=0.0).to(tl.float32)
    scale = tl.maximum(tl.max(tl.abs(value), axis=0) / 448.0, 1e-12)
    tl.store(scales + row, scale)
    # The order of columns is that of a weight's codes (codes/layout.py).
    place = column // 16 * 16 + column % 8 // 2 * 4 + column % 16 // 8 + column % 2 * 2
    tl.store(codes + row * size_in + place, (value / scale).to(tl.float8e4nv), mask=column < size_in)


@triton.jit
def _code_of(value, scale):
    quotient = tl.div_rn(value, tl.zeros_like(value) + scale[:, None])
    return quotient.to(tl.float8e4nv).to(tl.uint8, bitcast=True).to(tl.int32)


@triton.jit(do_not_specialize=["rows"])
def _to_codes_of_groups_kernel(
    x, codes, scales, of_lines, of_blocks, rows, words, x_stride, pitch, line_pitch, blocks, groups,
    WORDS: tl.constexpr, GROUPS: tl.constexpr, SHARE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1) * GROUPS + tl.arange(0, GROUPS)
    if row == rows:
        _transpose(of_lines, of_blocks, group, groups, blocks, line_pitch, _LINES // SHARE)
    else:
        _round(x, codes, scales, row, group, words, x_stride, pitch, WORDS)


@triton.jit
def _transpose(of_lines, of_blocks, group, groups, blocks, line_pitch, EACH: tl.constexpr):
    """Copy a weight's scales, of which the first of each block counts: from [groups, lines] to [blocks, groups]."""
    for first in range(0, blocks, _LINES):
        block = first + tl.arange(0, _LINES)
        inside = (group < groups)[:, None] & (block < blocks)[None, :]
        scale = tl.load(of_lines + group[:, None] * line_pitch + block[None, :] * EACH, mask=inside)
        tl.store(of_blocks + block[None, :] * groups + group[:, None], scale, mask=inside)


@triton.jit
def _round(x, codes, scales, row, group, words, x_stride, pitch, WORDS: tl.constexpr):
    """Round some groups of a row, and store their scales."""
    word = group[:, None] * WORDS + tl.arange(0, WORDS)[None, :]
    # Word c of four has the codes of columns 2c, 2c + 8, 2c + 1 and 2c + 9 of 16, as a weight's (codes/layout.py).
    pair = x + row * x_stride + word // 4 * 8 + word % 4
    near = tl.load(pair, mask=word < words, other=0)
    far = tl.load(pair + 4, mask=word < words, other=0)
    first = (near << 16).to(tl.float32, bitcast=True)
    second = (far << 16).to(tl.float32, bitcast=True)
    third = (near & -65536).to(tl.float32, bitcast=True)
    fourth = (far & -65536).to(tl.float32, bitcast=True)
    even, odd = tl.maximum(tl.abs(first), tl.abs(second)), tl.maximum(tl.abs(third), tl.abs(fourth))
    most = tl.max(tl.maximum(even, odd), axis=1)
    scale = tl.maximum(tl.div_rn(most, tl.zeros_like(most) + 448.0), 1e-12)
    tl.store(scales + group * pitch + row, scale, mask=group * WORDS < words)
    low = _code_of(first, scale) | (_code_of(second, scale) << 8)
    high = (_code_of(third, scale) << 16) | (_code_of(fourth, scale) << 24)
    tl.store(codes + row * words + word, low | high, mask=word < words)


def to_codes(x_NI: Tensor) -> tuple[Tensor, Tensor]:
    """Return (8-bit floats [N, I] in the order of a weight's codes, their scales, float32 [N, 1])."""
    rows, size_in = x_NI.shape
    codes_NI = torch.empty(rows, size_in, dtype=torch.float8_e4m3fn, device=x_NI.device)
    scales_N1 = torch.empty(rows, 1, dtype=torch.float32, device=x_NI.device)
    block = triton.next_power_of_2(size_in)
    _to_codes_kernel[(rows,)](
        x_NI, codes_NI, scales_N1, size_in, x_NI.stride(0), BLOCK=block, num_warps=4 if block <= 4096 else 8
    )
    return codes_NI, scales_N1


def to_codes_of_groups(
    x_NI: Tensor, of_lines: Tensor | None = None, size_out: int = 0, *, pdl: bool = False
) -> GroupCodes:
    """Return activations as 8-bit floats; the largest number of each row's group becomes the largest of these, 448.

    Args:
        x_NI: Activations, bf16, last dimension contiguous, at multiples of 4 bytes, I a multiple of 16; the last group
            may be smaller.
        of_lines: Scales of a weight in whole blocks, float32 [G or more, O / 8 or more], of which the same launch makes
            `blocks_LG`; None for none.
        size_out: O of that weight.
        pdl: Whether to use programmatic dependent launch, in which nothing is read before the wait.
    """
    rows, size_in = x_NI.shape
    groups, padded, blocks = triton.cdiv(size_in, GROUP), triton.cdiv(rows, _ROWS) * _ROWS, size_out // GROUP
    codes_NI = torch.empty(padded, size_in, dtype=torch.float8_e4m3fn, device=x_NI.device)
    scales_GN = torch.empty(groups, padded, dtype=torch.float32, device=x_NI.device)
    blocks_LG = torch.empty(blocks, groups, dtype=torch.float32, device=x_NI.device)
    each = min(_GROUPS, triton.next_power_of_2(groups))
    # What is not used is another tensor, which no program reads.
    lines = scales_GN if of_lines is None else of_lines
    _to_codes_of_groups_kernel[(rows + (blocks > 0), triton.cdiv(groups, each))](
        x_NI.view(torch.int32), codes_NI.view(torch.int32), scales_GN, lines, blocks_LG, rows, size_in // 4,
        x_NI.stride(0) // 2, padded, lines.stride(0), blocks, groups,
        WORDS=GROUP // 4, GROUPS=each, SHARE=LINES_OF_SCALE, PDL=pdl, num_warps=4, launch_pdl=pdl,
    )  # fmt: skip
    return GroupCodes(codes_NI, scales_GN, blocks_LG)
