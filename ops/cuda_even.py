"""Decode attention over equal parts of all rows' pages (csrc/even_decode.cu); never writes keys or values.

Where some dozen rows run, kernels that give a row and head to a block leave multiprocessors idle or unevenly busy. This
one counts the pages of all rows and gives every multiprocessor its share; all of it happens on the device, so that the
host plans nothing. Needs Hopper or newer for its copies. Shape letters as in `ops/paged.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from headrace.ops.cuda_source import compiled
from headrace.ops.paged import UNSCALED, KvScales

if TYPE_CHECKING:
    from torch import Tensor

    from headrace.ops.cuda_attention import HeadShape
    from headrace.ops.cuda_fused import DecodeInputs

__all__ = ["EvenDecode"]

_TILE = 16  # tokens
_MOST_PAGE_BYTES = 64 << 10  # keys and values: the ring holds three halves
_MOST_KV_HEADS = 8
_HOPPER = 9


class EvenDecode:
    """One token a row against its pages: `deal` once a step, then `run` for every layer."""

    def __init__(self, shape: HeadShape, device: torch.device, *, max_rows: int, pdl: bool = False) -> None:
        """Allocate for batches of up to `max_rows`; with `pdl` launch programmatically dependent.

        Old keys and values are then fetched before the previous kernel has finished: between `run` and the `deal` and
        `prepare_decode` before it there must be a kernel that was launched without.
        """
        self._shape, self._pdl = shape, pdl
        self._blocks = torch.cuda.get_device_properties(device).multi_processor_count
        self._module = self.build(shape)
        parts, heads = self._module.most_parts(self._blocks, max_rows), shape.heads
        words = self._module.plan_words(self._blocks, max_rows)
        self._plan = torch.zeros(words, dtype=torch.int32, device=device)
        self._partial = torch.empty(parts * heads * shape.head_dim, dtype=torch.float32, device=device)
        self._stats = torch.empty(parts * heads * 2, dtype=torch.float32, device=device)
        self._counters = torch.zeros(max_rows * shape.kv_heads, dtype=torch.int32, device=device)

    @staticmethod
    def build(shape: HeadShape) -> Any:
        """The compiled kernels for heads of `shape`; takes seconds and a compiler the first time.

        Raises:
            RuntimeError: They cannot be compiled.
            OSError: There is nothing to compile them with.
        """
        return compiled(
            "even_decode",
            HEAD_DIM=shape.head_dim, KV_HEADS=shape.kv_heads, GROUP=shape.heads // shape.kv_heads,
            PAGE=shape.page_size, KV_FP8=int(shape.kv_dtype != shape.dtype),
        )  # fmt: skip

    @staticmethod
    def supports(shape: HeadShape, device: torch.device) -> bool:
        """Whether the kernel can be compiled for heads of `shape` on `device`."""
        page_bytes = 2 * shape.page_size * shape.kv_heads * shape.head_dim * shape.kv_dtype.itemsize
        fp8 = shape.kv_dtype == torch.float8_e4m3fn
        return (
            torch.cuda.get_device_capability(device)[0] >= _HOPPER
            and shape.dtype == torch.bfloat16
            and (fp8 or shape.kv_dtype == shape.dtype)
            and shape.head_dim in ((128,) if fp8 else (64, 128))
            and shape.kv_heads <= _MOST_KV_HEADS
            and shape.heads // shape.kv_heads <= _TILE
            and shape.page_size % _TILE == 0
            and page_bytes <= _MOST_PAGE_BYTES
        )

    def plan(self, seq_lens: Sequence[int]) -> None:
        """Nothing to do: see `deal`."""

    def deal(self, inputs: DecodeInputs) -> None:
        """Enqueue the division of a step's pages among multiprocessors; capturable."""
        self._module.plan(inputs.seq_lens_B, self._plan, self._shape.window or 0, self._blocks)

    def run(
        self,
        q_BHD: Tensor,
        kv_layer: Tensor,
        inputs: DecodeInputs,
        out_BHD: Tensor,
        scales: KvScales = UNSCALED,
    ) -> None:
        """Enqueue one layer of the step that was dealt last; capturable."""
        shape = self._shape
        self._module.run(
            q_BHD,
            kv_layer,
            out_BHD,
            inputs.pages_BP,
            inputs.seq_lens_B,
            self._plan,
            self._partial,
            self._stats,
            self._counters,
            shape.window or 0,
            self._blocks,
            shape.scale * scales.k,
            scales.v,
            self._pdl,
        )
