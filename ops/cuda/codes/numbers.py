"""Functions of Triton's kernels that turn codes into numbers; never multiplies by inputs.

The kernels differ in the shapes of their tiles and in what they do with the numbers, so that each function takes
tensors of any shapes that broadcast to each other. `KIND` is a `Kind` throughout, and decides at compile time.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
import triton
import triton.language as tl

from headrace.ops.cuda.codes.kinds import E2M1, E4M3

if TYPE_CHECKING:
    from torch import Tensor

    from headrace.ops.cuda.codes.layout import Codes

__all__ = [
    "CodeMemory", "line_scales", "load_codes", "load_constants", "memory_of", "numbers_of", "pair_of", "write_line",
]  # fmt: skip

_SIGNS, _ABOVE = -0x7FFF8000, 0x4B000000
"""Bits of two signs, 16 apart, and 2^23 in float32. Kernels take them as arguments: of two constants in one operation
on bits, only one may be part of the instruction."""


class CodeMemory(NamedTuple):
    """The parts of a weight as kernels read them."""

    words: Tensor
    """Four words of 32 bits for each chunk."""
    high: Tensor
    scales: Tensor
    zeros: Tensor
    factors: Tensor
    table: Tensor
    pitch: int
    """Lines of the constants of groups, the padding included."""
    constant: int


def memory_of(weight: Codes) -> CodeMemory:
    """Return the arguments of a kernel that stand for a weight; what its kind lacks is never read."""
    return CodeMemory(
        weight.codes_OB.view(torch.int32), weight.high, weight.scales, weight.zeros, weight.factors, weight.table,
        weight.scales.shape[1] if weight.kind.group else 0, _SIGNS if weight.kind.codes in (E4M3, E2M1) else _ABOVE,
    )  # fmt: skip


@triton.jit
def load_codes(memory, line, chunk, chunks, inside, KIND: tl.constexpr):
    """Return what lines and chunks [.., ..] that broadcast to each other hold: words with four in a last dimension
    more, words of high bits with one, and the constants of the chunk's first and last group."""
    at = line * chunks + chunk
    word = tl.load(memory.words + at[:, :, None] * 4 + tl.arange(0, 4)[None, None, :], mask=inside[:, :, None], other=0)
    fifth = word
    sixth = word
    if KIND.high > 0:
        fifth = tl.load(memory.high + at * KIND.high, mask=inside, other=0)[:, :, None]
        sixth = fifth
    if KIND.high > 1:
        sixth = tl.load(memory.high + at * KIND.high + 1, mask=inside, other=0)[:, :, None]
    first = load_constants(memory, line, chunk * KIND.chunk, inside, KIND)
    last = first
    if KIND.parts > 1:
        last = load_constants(memory, line, chunk * KIND.chunk + KIND.group, inside, KIND)
    return word, (fifth, sixth), (first, last)


@triton.jit
def load_constants(memory, line, column, inside, KIND: tl.constexpr):
    """Return the scales of the groups of columns, and their zero points or minima; a scale of 1 where an output has
    one, and 0 for what the kind has not."""
    scale = tl.full([1, 1], 1.0, tl.float32)
    offset = tl.full([1, 1], 0.0, tl.float32)
    if KIND.group > 0:
        place = (column // KIND.group).to(tl.int64) * memory.pitch + line // KIND.share
        scale = _scale_of(tl.load(memory.scales + place, mask=inside, other=0), KIND)
        offset = tl.zeros_like(scale)
        if KIND.zeros or KIND.minima:
            offset = tl.load(memory.zeros + place, mask=inside, other=0).to(tl.float32)
        if KIND.factors > 0:
            above = (column // 256).to(tl.int64) * (KIND.factors * memory.pitch) + line
            scale *= tl.load(memory.factors + above, mask=inside, other=0).to(tl.float32)
            if KIND.minima:
                offset *= tl.load(memory.factors + above + memory.pitch, mask=inside, other=0).to(tl.float32)
        if KIND.scales == "e4m3 times":
            scale *= tl.load(memory.factors + line)
        if KIND.scales == "e4m3 over":
            scale = tl.div_rn(scale, tl.load(memory.factors + line) + tl.zeros_like(scale))
    elif KIND.zeros:
        offset = tl.load(memory.zeros + line).to(tl.float32)
    return scale, offset


@triton.jit
def line_scales(memory, line, KIND: tl.constexpr):
    """Return the scales of lines, 1 where groups have scales of their own."""
    scale = tl.full([1], 1.0, tl.float32)
    if KIND.group == 0:
        scale = tl.load(memory.scales + line).to(tl.float32)
    return scale


@triton.jit
def _scale_of(stored, KIND: tl.constexpr):
    """Return stored scales in float32, without their factors."""
    if KIND.scales == "e8m0":
        exponent = stored.to(tl.int32)
        bits = tl.where(exponent == 0, 0x00400000, exponent << 23)
        scale = tl.where(exponent == 255, 0x7FC00000, bits).to(tl.float32, bitcast=True)
    elif KIND.scales == "e4m3 times" or KIND.scales == "e4m3 over":
        code = stored.to(tl.int32)
        scale = (((code & 128) << 24) | ((code & 127) << 20)).to(tl.float32, bitcast=True) * 1.329227995784916e36
    else:
        scale = stored.to(tl.float32)
    return scale


@triton.jit
def pair_of(word, high, table, number, constant, PAIR: tl.constexpr, KIND: tl.constexpr):
    """Return two numbers, 16 bits apart in a word, in float32, without scale, and zero points where groups have them.

    They are 2^-120 of their value for e4m3, 2^-126 for e2m1, and 2^(PAIR * bits) times theirs for integers of 4 and 8
    bits. The caller makes good for it, by scaling what is fewer than the codes.

    Args:
        word: Words of codes.
        high: Two words of high bits, of which a kind uses as many as it has.
        table: Addresses of the tables of the lines.
        number: Number of the pair in its chunk.
        constant: `CodeMemory.constant`.
    """
    if KIND.codes == "fp8":  # bf16 with the bits of an e4m3 in their places
        if PAIR == 0:
            pair = ((word << 8) & constant) | ((word << 4) & 0x07F007F0)
        else:
            pair = (word & constant) | ((word >> 4) & 0x07F007F0)
        return (pair << 16).to(tl.float32, bitcast=True), (pair & -65536).to(tl.float32, bitcast=True)
    elif KIND.codes == "fp4":  # the same with those of an e2m1
        if PAIR < 2:
            pair = ((word << (12 - 4 * PAIR)) & constant) | ((word << (6 - 4 * PAIR)) & 0x01C001C0)
        else:
            pair = ((word << (12 - 4 * PAIR)) & constant) | ((word >> (4 * PAIR - 6)) & 0x01C001C0)
        return (pair << 16).to(tl.float32, bitcast=True), (pair & -65536).to(tl.float32, bitcast=True)
    elif KIND.codes == "table4":
        return tl.load(table + ((word >> (4 * PAIR)) & 15)), tl.load(table + ((word >> (4 * PAIR + 16)) & 15))
    elif KIND.high > 0:  # 2^23 plus a code is a float32 whose last bits are the code
        pair = ((word >> (4 * PAIR)) & 0x000F000F) | (((high[0] >> number) & 0x00010001) << 4)
        if KIND.high > 1:
            pair |= ((high[1] >> number) & 0x00010001) << 5
        ABOVE: tl.constexpr = 8388608.0 + KIND.middle
        low = ((pair & 0xFFFF) | constant).to(tl.float32, bitcast=True) - ABOVE
        return low, ((pair >> 16) | constant).to(tl.float32, bitcast=True) - ABOVE
    else:
        if KIND.codes == "int8":  # from two's complement to integers above zero
            word = word ^ -2139062144
        MASK: tl.constexpr = ((1 << KIND.bits) - 1) << (KIND.bits * PAIR)
        SHIFTED: tl.constexpr = 8388608.0 + (KIND.middle << (KIND.bits * PAIR))
        low = ((word & MASK) | constant).to(tl.float32, bitcast=True) - SHIFTED
        return low, (((word >> 16) & MASK) | constant).to(tl.float32, bitcast=True) - SHIFTED


@triton.jit
def numbers_of(word, high, table, number, constant, constants, PAIR: tl.constexpr, KIND: tl.constexpr):
    """Return the two weights of a pair in float32, as `CodeLayout.dense` has them, but for the scale of an output."""
    low, up = pair_of(word, high, table, number, constant, PAIR, KIND)
    scale, offset = constants
    if KIND.codes == "fp8":
        low *= 1.329227995784916e36
        up *= 1.329227995784916e36
    elif KIND.codes == "fp4":
        low *= 8.507059173023462e37
        up *= 8.507059173023462e37
    elif (KIND.codes == "int4" or KIND.codes == "int8") and PAIR > 0:  # powers of two: nothing is rounded
        scale *= 1.0 / (1 << (KIND.bits * PAIR))
        if KIND.zeros:
            offset *= 1.0 * (1 << (KIND.bits * PAIR))
    if KIND.zeros:
        low -= offset
        up -= offset
    low *= scale
    up *= scale
    if KIND.minima:  # their products are exact in float32, so that it is all the same whether a sum is fused
        low += offset
        up += offset
    return low, up


@triton.jit
def write_line(memory, line, out, row, block, chunks, KIND: tl.constexpr, BLOCK: tl.constexpr, BF16: tl.constexpr):
    """Write the numbers of a line, an int64, in bf16 or fp16, those of a block of `BLOCK` chunks, to a row of `out`.

    `out` holds words of 32 bits: neighbours are stored together, as single elements would cost as many transactions as
    16 bytes.
    """
    DTYPE: tl.constexpr = tl.bfloat16 if BF16 else tl.float16
    chunk = block * BLOCK + tl.arange(0, BLOCK)  # of 16 bytes
    inside = (chunk < chunks)[:, None]
    number = tl.arange(0, 4 * KIND.pairs)[None, :]  # of a pair of neighbours in the chunk
    at = (line * chunks + chunk)[:, None]
    word = tl.load(memory.words + at * 4 + number % 4, mask=inside, other=0)
    fifth = word
    sixth = word
    if KIND.high > 0:
        fifth = tl.load(memory.high + at * KIND.high, mask=inside, other=0)
    if KIND.high > 1:
        sixth = tl.load(memory.high + at * KIND.high + 1, mask=inside, other=0)
    if KIND.group >= KIND.chunk:
        scale, offset = load_constants(memory, line, chunk * KIND.chunk, chunk < chunks, KIND)
        constants = (scale[:, None], offset[:, None])
    else:
        constants = load_constants(memory, line, chunk[:, None] * KIND.chunk + 2 * number, inside, KIND)
    shifted = word >> (KIND.bits * (number // 4))
    table = memory.table + line // 8 * 16
    low, up = numbers_of(shifted, (fifth, sixth), table, number, memory.constant, constants, 0, KIND)
    of_line = line_scales(memory, line, KIND)
    low = (low * of_line).to(DTYPE).to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF
    up = (up * of_line).to(DTYPE).to(tl.int16, bitcast=True).to(tl.int32) << 16
    place = (row.to(tl.int64) * chunks + chunk)[:, None] * (4 * KIND.pairs) + number
    tl.store(out + place, low | up, mask=inside)
