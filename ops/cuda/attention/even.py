"""Decode attention over equal parts of all rows' pages (csrc/even_decode.cu); never writes keys or values.

Where some dozen rows run, kernels that give a row and head to a block leave multiprocessors idle or unevenly busy. This
one counts the pages of all rows and gives every multiprocessor an equal share, all on the device, so that the host
plans nothing. Where rows have several lines, all of these attend to a key that is read once. Needs Hopper or newer for
its copies. Shape letters as in `ops/paged.py`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from headrace.ops.cuda.attention.ring import query_room, shared_bytes
from headrace.ops.cuda.compiling.source import compiled
from headrace.ops.paged import UNSCALED, KvScales

if TYPE_CHECKING:
    from torch import Tensor

    from headrace.ops.cuda.arch import Arch
    from headrace.ops.cuda.attention.shape import HeadShape
    from headrace.ops.cuda.fused import DecodeInputs

__all__ = ["EvenDecode"]


class EvenDecode:
    """Decode attention with equal shares: `deal` once for each step, then `run` for every layer."""

    def __init__(
        self,
        shape: HeadShape,
        device: torch.device,
        *,
        max_rows: int,
        arch: Arch,
        pdl: bool = False,
        lines: int = 1,
    ) -> None:
        """Allocate.

        Args:
            shape: Heads, window, cache dtype.
            device: The GPU.
            max_rows: Most rows of a batch.
            arch: What the GPU can run.
            pdl: Whether to use programmatic dependent launch; kernels.py declares what `run` reads before it waits.
            lines: Number of lines of each row.
        """
        self._shape, self._pdl, self._lines = shape, pdl, lines
        self._blocks = arch.processors
        self._module = self.build(shape, lines)
        parts, heads = self._module.most_parts(self._blocks, max_rows), shape.heads * lines
        words = self._module.plan_words(self._blocks, max_rows)
        self._plan = torch.zeros(words, dtype=torch.int32, device=device)
        self._partial = torch.empty(parts * heads * shape.head_dim, dtype=torch.float32, device=device)
        self._stats = torch.empty(parts * heads * 2, dtype=torch.float32, device=device)
        self._counters = torch.zeros(max_rows * shape.kv_heads, dtype=torch.int32, device=device)

    @staticmethod
    def build(shape: HeadShape, lines: int = 1) -> Any:
        """Return the compiled kernels for heads of `shape`; takes seconds and a compiler the first time.

        Rows of several lines have two kernels, one for up to 16 query heads of all lines and a key head together, and
        one for up to 32.

        Raises:
            CannotCompile: The kernels are not kept and cannot be compiled.
            OSError: A compiler cannot be run, or the folder of kernels cannot be written.
        """
        queries = query_room(shape, lines)
        assert queries is not None, "more lines than the kernel takes"
        return compiled(
            "even_decode",
            HEAD_DIM=shape.head_dim, KV_HEADS=shape.kv_heads, GROUP=shape.heads // shape.kv_heads,
            PAGE=shape.page_size, KV_FP8=int(shape.kv_dtype != shape.dtype), QUERIES=queries,
            HAS_LINES=int(lines > 1), SHARED_BYTES=shared_bytes(shape, queries),
        )  # fmt: skip

    def deal(self, inputs: DecodeInputs) -> None:
        """Enqueue the division of a step's pages among multiprocessors; a graph can capture it."""
        self._module.plan(inputs.seq_lens_B, self._plan, self._lines, self._shape.window or 0, self._blocks)

    def run(
        self,
        q_BHD: Tensor,
        kv_layer: Tensor,
        inputs: DecodeInputs,
        out_BHD: Tensor,
        scales: KvScales = UNSCALED,
        sinks_H: Tensor | None = None,
    ) -> None:
        """Enqueue one layer of the step that was dealt last; a graph can capture it."""
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
            self._stats[:0] if sinks_H is None else sinks_H,
            shape.window or 0,
            self._blocks,
            shape.scale * scales.k,
            scales.v,
            self._lines,
            self._pdl,
        )
