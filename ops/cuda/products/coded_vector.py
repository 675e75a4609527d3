"""Products of one to eight rows with weights in codes on CUDA (Triton), with the activation after in the same kernel.

Never used for more rows: without tensor cores its arithmetic grows with them. Codes become float32 in registers where
they are multiplied, and a chunk of 16 bytes is summed before its scale multiplies it. A program loads its codes before
it waits for the kernel that makes its input (programmatic dependent launch). I input features, O output features, N
rows.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from headrace.ops.cuda.products.codes import E4M3, Codes

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["MAX_ROWS", "TILINGS", "VectorTiling", "coded_vector_linear"]

MAX_ROWS = 8


class VectorTiling(NamedTuple):
    """The work of a program; sizes are powers of two."""

    block: int
    """Chunks of 16 bytes of a line that are read at once."""
    lines: int
    """Lines of the weight, gates and ups included."""
    warps: int


TILINGS: Final = {4: VectorTiling(64, 4, 2), 8: VectorTiling(128, 8, 4)}
"""Division of the work by the bits of a code."""
_SIGNS, _ABOVE = -0x7FFF8000, 0x4B000000
"""Bits of two signs, 16 apart, and 2^23 in float32. The kernel takes them as arguments: of two constants in one
operation on bits, only one may be part of the instruction."""


@triton.jit
def _load_codes(
    words,
    scales,
    zeros,
    line,
    chunk,
    chunks,
    pitch,
    GROUP: tl.constexpr,
    ZEROS: tl.constexpr,
    SHARE: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Return words [chunks, lines, 4], and scales and zero points [chunks, lines]; chunks come first, so that a thread
    has some chunks of all lines, and reads their inputs once."""
    inside = chunk < chunks
    at = (line[None, :] * chunks + chunk[:, None])[:, :, None] * 4 + tl.arange(0, 4)[None, None, :]
    word = tl.load(words + at, mask=inside[:, None, None], other=0)
    scale = tl.full([1, 1], 1.0, tl.float32)
    zero = tl.full([1, 1], 0.0, tl.float32)
    if GROUP > 0:
        place = (chunk * CHUNK // GROUP).to(tl.int64)[:, None] * pitch + (line // SHARE)[None, :]
        scale = tl.load(scales + place, mask=inside[:, None], other=0.0).to(tl.float32)
        if ZEROS:
            zero = tl.load(zeros + place, mask=inside[:, None], other=0).to(tl.float32)
    return word, scale, zero


@triton.jit
def _pair_of(word, constant, PAIR: tl.constexpr, CODES: tl.constexpr, ZEROS: tl.constexpr):
    """Return the two codes of a pair, 16 bits apart in a word, as float32, times a power of two for each pair."""
    if CODES == 1:  # bf16 with the bits of an e4m3 in their places is 2^-120 of its value
        if PAIR == 0:
            pair = ((word << 8) & constant) | ((word << 4) & 0x07F007F0)
        else:
            pair = (word & constant) | ((word >> 4) & 0x07F007F0)
        low = (pair << 16).to(tl.float32, bitcast=True)
        high = (pair & -65536).to(tl.float32, bitcast=True)
    else:  # 2^23 plus a code is a float32 whose last bits are the code
        BITS: tl.constexpr = 4 if CODES == 3 else 8
        MASK: tl.constexpr = ((1 << BITS) - 1) << (BITS * PAIR)
        MIDDLE: tl.constexpr = 0 if ZEROS else 1 << (BITS - 1 + BITS * PAIR)
        ABOVE: tl.constexpr = 8388608.0 + MIDDLE
        low = ((word & MASK) | constant).to(tl.float32, bitcast=True) - ABOVE
        high = (((word >> 16) & MASK) | constant).to(tl.float32, bitcast=True) - ABOVE
    return low, high


@triton.jit
def _sums_of(
    x, word, scale, zero, chunk, chunks, constant, CODES: tl.constexpr, ZEROS: tl.constexpr, PAIRS: tl.constexpr
):
    """Return the sums [lines] of one row's inputs by codes and scales, without the factor of the kind of codes."""
    BITS: tl.constexpr = 4 if CODES == 3 else 8
    pair_at = chunk[:, None] * (4 * PAIRS) + tl.arange(0, 4)[None, :]
    inside = chunk < chunks
    sums = tl.zeros_like(word).to(tl.float32)
    x_sums = tl.zeros_like(pair_at).to(tl.float32)
    for pair in tl.static_range(PAIRS):
        both = tl.load(x + pair_at + 4 * pair, mask=inside[:, None], other=0)
        x_low = (both << 16).to(tl.float32, bitcast=True)
        x_high = (both & -65536).to(tl.float32, bitcast=True)
        if ZEROS:
            x_sums += x_low + x_high
        if CODES == 1:  # an input takes half of 2^120, and the sum the other
            x_low *= 1.152921504606846976e18
            x_high *= 1.152921504606846976e18
        else:
            x_low *= 1.0 / (1 << (BITS * pair))
            x_high *= 1.0 / (1 << (BITS * pair))
        low, high = _pair_of(word, constant, pair, CODES, ZEROS)
        sums += low * x_low[:, None, :]
        sums += high * x_high[:, None, :]
    of_chunks = tl.sum(sums, axis=2)
    if ZEROS:
        of_chunks -= zero * tl.sum(x_sums, axis=1)[:, None]
    return tl.sum(of_chunks * scale, axis=0)


@triton.jit(do_not_specialize=["pitch", "constant"])
def _coded_vector_kernel(
    x,
    words,
    scales,
    zeros,
    out,
    size_out,
    chunks,
    pitch,
    x_stride,
    out_stride,
    constant,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    BLOCK_OUT: tl.constexpr,
    BLOCK: tl.constexpr,
    STEPS: tl.constexpr,
    CODES: tl.constexpr,
    GROUP: tl.constexpr,
    ZEROS: tl.constexpr,
    GATED: tl.constexpr,
    PDL: tl.constexpr,
):
    PAIRS: tl.constexpr = 4 if CODES == 3 else 2
    CHUNK: tl.constexpr = 8 * PAIRS  # inputs
    SHARE: tl.constexpr = 8 if CODES == 1 else 1
    HALVES: tl.constexpr = 2 if GATED else 1  # a gate's line, then its up's
    own = tl.arange(0, BLOCK_OUT * HALVES)
    known = tl.minimum(tl.program_id(0) * BLOCK_OUT + own // HALVES, size_out - 1).to(tl.int64)
    line = known + own % HALVES * size_out
    first = tl.arange(0, BLOCK)
    word, scale, zero = _load_codes(words, scales, zeros, line, first, chunks, pitch, GROUP, ZEROS, SHARE, CHUNK)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    column = tl.arange(0, COLUMNS)[None, :]
    total = tl.zeros([BLOCK_OUT * HALVES, COLUMNS], tl.float32)
    for step in tl.static_range(STEPS):
        chunk = step * BLOCK + first
        if step + 1 < STEPS:
            word_next, scale_next, zero_next = _load_codes(
                words, scales, zeros, line, chunk + BLOCK, chunks, pitch, GROUP, ZEROS, SHARE, CHUNK
            )
        if CODES == 2:  # from two's complement to integers above zero
            word = word ^ -2139062144
        for row in tl.static_range(ROWS):
            sums = _sums_of(x + row * x_stride, word, scale, zero, chunk, chunks, constant, CODES, ZEROS, PAIRS)
            total += tl.where(column == row, sums[:, None], 0.0)
        if step + 1 < STEPS:
            word, scale, zero = word_next, scale_next, zero_next
    if CODES == 1:
        total *= 1.152921504606846976e18
    if GROUP == 0:
        total *= tl.load(scales + line)[:, None]
    if GATED:
        gate, up = total.reshape(BLOCK_OUT, 2, COLUMNS).permute(0, 2, 1).split()
        total = gate * tl.sigmoid(gate) * up
    feature = tl.program_id(0) * BLOCK_OUT + tl.arange(0, BLOCK_OUT)[:, None]
    mask = (feature < size_out) & (column < ROWS)
    tl.store(out + column * out_stride + feature, total.to(out.dtype.element_ty), mask=mask)


def coded_vector_linear(
    x_NI: Tensor,
    weight: Codes,
    out_NO: Tensor,
    *,
    gated: bool = False,
    pdl: bool = False,
    how: VectorTiling | None = None,
) -> None:
    """Compute `out = x W^T` for at most `MAX_ROWS` rows, accumulated in float32.

    Args:
        x_NI: Input, bf16, last dimension contiguous, at even addresses of 4 bytes.
        weight: Weight [O, I] in codes. With `gated`, O gate rows, then O up rows.
        out_NO: Output in any float dtype, last dimension contiguous; must not overlap the input.
        gated: Whether to compute `out = silu(gate) * up`.
        pdl: Whether to use programmatic dependent launch; kernels.py declares what is then read before the wait.
        how: Division of the work; None for that of `TILINGS`.

    Raises:
        ValueError: Too many rows.
    """
    (rows, size_in), kind = x_NI.shape, weight.kind
    if rows > MAX_ROWS:
        raise ValueError(f"{rows} rows: at most {MAX_ROWS}")
    size_out = weight.shape[0] // 2 if gated else weight.shape[0]
    chunks = size_in * kind.bits // 128
    how = how or TILINGS[kind.bits]
    block = min(how.block, triton.next_power_of_2(chunks))
    block_out = max(how.lines // (2 if gated else 1), 1)
    # fmt: off
    _coded_vector_kernel[(triton.cdiv(size_out, block_out),)](
        x_NI.view(torch.int32), weight.codes_OB.view(torch.int32), weight.scales, weight.zeros, out_NO, size_out,
        chunks, weight.scales.shape[1] if kind.group else 0, x_NI.stride(0) // 2, out_NO.stride(0),
        _SIGNS if kind.codes == E4M3 else _ABOVE,
        ROWS=rows, COLUMNS=triton.next_power_of_2(rows), BLOCK_OUT=block_out, BLOCK=block,
        STEPS=triton.cdiv(chunks, block), CODES=kind.codes, GROUP=kind.group, ZEROS=kind.zeros, GATED=gated, PDL=pdl,
        num_warps=how.warps, launch_pdl=pdl,
    )
    # fmt: on
