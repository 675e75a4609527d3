"""`unpack`: makes a dense copy of a slice of a weight in codes (Triton), for products of many rows.

I input features, O output features, N rows.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from headrace.ops.cuda.codes.numbers import memory_of, write_line

if TYPE_CHECKING:
    from torch import Tensor

    from headrace.ops.cuda.codes.layout import Codes

__all__ = ["SLICE", "unpack"]

SLICE = 32 << 20
"""Elements of a slice: 64 MiB in bf16, most of which stay in the L2 cache, and outputs enough to fill the GPU."""
_CHUNKS = 64


@triton.jit(do_not_specialize=["first"])
def _unpack_kernel(memory, out, first, chunks, KIND: tl.constexpr, BLOCK: tl.constexpr, BF16: tl.constexpr):
    row = tl.program_id(0)
    line = (first + row).to(tl.int64)
    write_line(memory, line, out, row, tl.program_id(1), chunks, KIND, BLOCK, BF16)


def unpack(weight: Codes, first: int, out_OI: Tensor) -> None:
    """Write the outputs of a weight from `first` on, dense, into `out_OI`, contiguous, in bf16 or fp16."""
    rows, size_in = out_OI.shape
    chunks = size_in // weight.kind.chunk
    _unpack_kernel[(rows, triton.cdiv(chunks, _CHUNKS))](
        memory_of(weight), out_OI.view(torch.int32), first, chunks, KIND=weight.kind, BLOCK=_CHUNKS,
        BF16=out_OI.dtype is torch.bfloat16, num_warps=4,
    )  # fmt: skip
