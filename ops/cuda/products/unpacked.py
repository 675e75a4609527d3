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
):
    row = tl.program_id(0)
    line = (first + row).to(tl.int64)
    chunk = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)  # of 16 bytes
    inside = chunk < chunks
    thread = tl.arange(0, 4)[None, None, :]
    pair = tl.arange(0, PAIRS)[None, :, None]
    at = (line * chunks + chunk)[:, None, None]
    word = tl.load(words + at * 4 + thread + 0 * pair, mask=inside[:, None, None], other=0)
    if CODES == 3:
        shifted = word >> (4 * pair)
        value = tl.join(shifted & 15, (shifted >> 16) & 15).to(tl.float32)
        if not ZEROS:
            value -= 8.0
    else:
        shifted = word >> (8 * pair)
        code = tl.join(shifted & 255, (shifted >> 16) & 255)
        if CODES == 1:  # bf16 with the bits of an e4m3 in their places is 2^-120 of its value; any GPU can do that
            bits = (((code & 128) << 8) | ((code & 127) << 4)).to(tl.uint16)
            value = bits.to(tl.bfloat16, bitcast=True).to(tl.float32) * 1.329227995784916e36
        else:
            value = ((code ^ 128) - 128).to(tl.float32)
    if GROUP == 0:
        value *= tl.load(scales + line)
    else:
        place = chunk * (8 * PAIRS) // GROUP * pitch + line // SHARE
        if ZEROS:
            value -= tl.load(zeros + place, mask=inside, other=0).to(tl.float32)[:, None, None, None]
        value *= tl.load(scales + place, mask=inside, other=0.0).to(tl.float32)[:, None, None, None]
    even = ((row.to(tl.int64) * chunks + chunk)[:, None, None] * PAIRS + pair) * 8 + 2 * thread
    target = tl.join(out + even, out + even + 1)
    tl.store(target, value.to(out.dtype.element_ty), mask=inside[:, None, None, None])


def unpack(weight: Codes, first: int, out_OI: Tensor) -> None:
    """Write the outputs of a weight from `first` on, dense, into `out_OI`, contiguous."""
    kind, (rows, size_in) = weight.kind, out_OI.shape
    chunks = size_in * kind.bits // 128
    _unpack_kernel[(rows, triton.cdiv(chunks, _CHUNKS))](
        weight.codes_OB.view(torch.int32), weight.scales, weight.zeros, out_OI, first, chunks,
        weight.scales.shape[1] if kind.group else 0,
        CODES=kind.codes, GROUP=kind.group, ZEROS=kind.zeros, SHARE=8 if kind.codes == E4M3 else 1,
        PAIRS=4 if kind.codes == INT4 else 2, BLOCK=_CHUNKS, num_warps=4,
    )  # fmt: skip
