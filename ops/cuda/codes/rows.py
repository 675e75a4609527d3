"""`CodeRows`: hands out rows of a matrix in codes as numbers (Triton), such as the embeddings of a step's tokens.

N rows that are wanted, E elements of a row.
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

__all__ = ["CodeRows"]

_CHUNKS = 64


@triton.jit(do_not_specialize_on_alignment=["ids"])
def _read_rows_kernel(memory, ids, out, chunks, KIND: tl.constexpr, BLOCK: tl.constexpr, BF16: tl.constexpr):
    row = tl.program_id(0)
    line = tl.load(ids + row).to(tl.int64)
    write_line(memory, line, out, row, tl.program_id(1), chunks, KIND, BLOCK, BF16)


class CodeRows:
    """Rows of a matrix, with the bits of `CodeLayout.dense`: each number is computed in float32 and rounded once."""

    def __init__(self, codes: Codes, dtype: torch.dtype) -> None:
        """Read rows of `codes`, which are shared, in `dtype`: bf16 or fp16."""
        self._codes, self._dtype = codes, dtype
        self._back_E = codes.order_I.argsort() if codes.kind.ordered else None

    def __getitem__(self, ids_N: Tensor, /) -> Tensor:
        """Return the rows `ids_N` (int32 or int64) as a new tensor, [N, E]."""
        kind, size = self._codes.kind, self._codes.shape[1]
        rows_NE = torch.empty(len(ids_N), size, dtype=self._dtype, device=ids_N.device)
        chunks = size // kind.chunk
        _read_rows_kernel[(len(ids_N), triton.cdiv(chunks, _CHUNKS))](
            memory_of(self._codes), ids_N.contiguous(), rows_NE.view(torch.int32), chunks, KIND=kind.in_order,
            BLOCK=_CHUNKS, BF16=self._dtype is torch.bfloat16, num_warps=4,
        )  # fmt: skip
        return rows_NE if self._back_E is None else rows_NE.index_select(1, self._back_E)
