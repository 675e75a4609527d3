"""`unpack`: makes a dense copy of a slice of a weight in codes (Triton), for products of many rows.

I input features, O output features, N rows.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from headrace.ops.cuda.codes.numbers import line_scales, load_constants, memory_of, numbers_of

if TYPE_CHECKING:
    from torch import Tensor

    from headrace.ops.cuda.codes.layout import Codes

__all__ = ["SLICE", "unpack"]

SLICE = 32 << 20
"""Elements of a slice: 64 MiB in bf16, most of which stay in the L2 cache, and outputs enough to fill the GPU."""
_CHUNKS = 64


@triton.jit(do_not_specialize=["first"])
def _unpack_kernel(memory, out, first, chunks, KIND: tl.constexpr, BLOCK: tl.constexpr, DTYPE: tl.constexpr):
    row = tl.program_id(0)
    line = (first + row).to(tl.int64)
    chunk = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)  # of 16 bytes
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
    # Neighbours are stored together: single elements would cost as many transactions as 16 bytes.
    low = (low * of_line).to(DTYPE).to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF
    up = (up * of_line).to(DTYPE).to(tl.int16, bitcast=True).to(tl.int32) << 16
    place = (row.to(tl.int64) * chunks + chunk)[:, None] * (4 * KIND.pairs) + number
    tl.store(out + place, low | up, mask=inside)


def unpack(weight: Codes, first: int, out_OI: Tensor) -> None:
    """Write the outputs of a weight from `first` on, dense, into `out_OI`, contiguous, in bf16 or fp16."""
    rows, size_in = out_OI.shape
    chunks = size_in // weight.kind.chunk
    _unpack_kernel[(rows, triton.cdiv(chunks, _CHUNKS))](
        memory_of(weight), out_OI.view(torch.int32), first, chunks, KIND=weight.kind, BLOCK=_CHUNKS,
        DTYPE=tl.bfloat16 if out_OI.dtype is torch.bfloat16 else tl.float16, num_warps=4,
    )  # fmt: skip
