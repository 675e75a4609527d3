"""`unpack`: makes a dense copy of a slice of a weight in codes (Triton), for products of many rows.

I input features, O output features, N rows.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from headrace.ops.cuda.products.codes import E4M3, INT4, Codes

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["SLICE", "unpack"]

SLICE = 32 << 20
"""Elements of a slice: 64 MiB in bf16, most of which stay in the L2 cache, and outputs enough to fill the GPU."""
_CHUNKS = 64


@triton.jit
def _value_of(code, CODES: tl.constexpr, ZEROS: tl.constexpr):
    """Return a code as float32."""
    if CODES == 3:
        value = code.to(tl.float32)
        if not ZEROS:
            value -= 8.0
    elif CODES == 1:  # bf16 with the bits of an e4m3 in their places is 2^-120 of its value; any GPU can do that
        bits = ((code & 128) << 24) | ((code & 127) << 20)
        value = bits.to(tl.float32, bitcast=True) * 1.329227995784916e36
    else:
        value = ((code ^ 128) - 128).to(tl.float32)
    return value


@triton.jit(do_not_specialize=["first"])
def _unpack_kernel(
    words,
    scales,
    zeros,
    out,
    first,
    chunks,
    pitch,
    CODES: tl.constexpr,
    GROUP: tl.constexpr,
    ZEROS: tl.constexpr,
    SHARE: tl.constexpr,
    PAIRS: tl.constexpr,
    BLOCK: tl.constexpr,
    DTYPE: tl.constexpr,
):
    row = tl.program_id(0)
    line = (first + row).to(tl.int64)
    chunk = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)  # of 16 bytes
    inside = chunk < chunks
    number = tl.arange(0, 4 * PAIRS)[None, :]  # of a pair of neighbours in the chunk
    at = (line * chunks + chunk)[:, None]
    word = tl.load(words + at * 4 + number % 4, mask=inside[:, None], other=0)
    BITS: tl.constexpr = 4 if CODES == 3 else 8
    MASK: tl.constexpr = (1 << BITS) - 1
    shifted = word >> (BITS * (number // 4))
    low = _value_of(shifted & MASK, CODES, ZEROS)
    high = _value_of((shifted >> 16) & MASK, CODES, ZEROS)
    if GROUP == 0:
        scale = tl.load(scales + line)
        low *= scale
        high *= scale
    else:
        place = chunk * (8 * PAIRS) // GROUP * pitch + line // SHARE
        if ZEROS:
            zero = tl.load(zeros + place, mask=inside, other=0).to(tl.float32)[:, None]
            low -= zero
            high -= zero
        scale = tl.load(scales + place, mask=inside, other=0.0).to(tl.float32)[:, None]
        low *= scale
        high *= scale
    # Neighbours are stored together: single elements would cost as many transactions as 16 bytes.
    low = low.to(DTYPE).to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF
    high = high.to(DTYPE).to(tl.int16, bitcast=True).to(tl.int32) << 16
    place = (row.to(tl.int64) * chunks + chunk)[:, None] * (4 * PAIRS) + number
    tl.store(out + place, low | high, mask=inside[:, None])


def unpack(weight: Codes, first: int, out_OI: Tensor) -> None:
    """Write the outputs of a weight from `first` on, dense, into `out_OI`, contiguous, in bf16 or fp16."""
    kind, (rows, size_in) = weight.kind, out_OI.shape
    chunks = size_in * kind.bits // 128
    _unpack_kernel[(rows, triton.cdiv(chunks, _CHUNKS))](
        weight.codes_OB.view(torch.int32), weight.scales, weight.zeros, out_OI.view(torch.int32), first, chunks,
        weight.scales.shape[1] if kind.group else 0,
        CODES=kind.codes, GROUP=kind.group, ZEROS=kind.zeros, SHARE=8 if kind.codes == E4M3 else 1,
        PAIRS=4 if kind.codes == INT4 else 2, BLOCK=_CHUNKS,
        DTYPE=tl.bfloat16 if out_OI.dtype is torch.bfloat16 else tl.float16, num_warps=4,
    )  # fmt: skip
