"""Decode attention over equal parts of all rows' pages (csrc/even_decode.cu); never writes keys or values.

Where some dozen rows run, kernels that give a row and head to a block leave multiprocessors idle or unevenly busy. This
one counts the pages of all rows and gives every multiprocessor an equal share, all on the device, so that the host
plans nothing. Needs Hopper or newer for its copies. Shape letters as in `ops/paged.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from headrace.ops.cuda.arch import Arch
from headrace.ops.cuda.compiling.source import compiled
from headrace.ops.paged import UNSCALED, KvScales

if TYPE_CHECKING:
    from torch import Tensor

    from headrace.ops.cuda.attention.paged import HeadShape
    from headrace.ops.cuda.fused import DecodeInputs

__all__ = ["EvenDecode"]

_TILE = 16  # tokens
_MOST_KV_HEADS = 8
_MOST_PAGE_BYTES = 64 << 10  # keys and values of one layer: a ring has room for three halves of this
_RING_BYTES = 96 << 10
_MOST_SLOTS = 32
_BARRIER_BYTES = 16  # two barriers for each slot


def _page_bytes(shape: HeadShape) -> int:
    return 2 * shape.page_size * shape.kv_heads * shape.head_dim * shape.kv_dtype.itemsize


def _shared_bytes(shape: HeadShape) -> int:
    """Return a block's bytes of shared memory: ring and barriers of csrc/even_decode.cu, which checks this number."""
    piece = _page_bytes(shape) // 2
    warps = max(1, _MOST_KV_HEADS // shape.kv_heads)
    turns = 1 if warps == 1 else 2 * warps
    slots = -(-min(_RING_BYTES // piece, _MOST_SLOTS) // turns) * turns
    return slots * (piece + _BARRIER_BYTES)


class EvenDecode:
    """Decode attention with equal shares: `deal` once for each step, then `run` for every layer."""

    def __init__(self, shape: HeadShape, device: torch.device, *, max_rows: int, pdl: bool = False) -> None:
        """Allocate for batches of up to `max_rows`; `pdl` is whether to use programmatic dependent launch.

        With `pdl`, old keys and values are fetched before the previous kernel has finished: between `run` and the
        `deal` and `prepare_decode` before it there must be a kernel that was launched without `pdl`.
        """
        self._shape, self._pdl = shape, pdl
        self._blocks = Arch.of(device).processors
        self._module = self.build(shape)
        parts, heads = self._module.most_parts(self._blocks, max_rows), shape.heads
        words = self._module.plan_words(self._blocks, max_rows)
        self._plan = torch.zeros(words, dtype=torch.int32, device=device)
        self._partial = torch.empty(parts * heads * shape.head_dim, dtype=torch.float32, device=device)
        self._stats = torch.empty(parts * heads * 2, dtype=torch.float32, device=device)
        self._counters = torch.zeros(max_rows * shape.kv_heads, dtype=torch.int32, device=device)

    @staticmethod
    def build(shape: HeadShape) -> Any:
        """Return the compiled kernels for heads of `shape`; takes seconds and a compiler the first time.

        Raises:
            CannotCompile: The kernels are not kept and cannot be compiled.
            OSError: A compiler cannot be run, or the folder of kernels cannot be written.
        """
        return compiled(
            "even_decode",
            HEAD_DIM=shape.head_dim, KV_HEADS=shape.kv_heads, GROUP=shape.heads // shape.kv_heads,
            PAGE=shape.page_size, KV_FP8=int(shape.kv_dtype != shape.dtype), SHARED_BYTES=_shared_bytes(shape),
        )  # fmt: skip

    @staticmethod
    def refuses(shape: HeadShape, arch: Arch) -> str | None:
        """Return why the kernel cannot run for heads of `shape` on a GPU; None if it can."""
        fp8 = shape.kv_dtype == torch.float8_e4m3fn
        if shape.dtype != torch.bfloat16 or not (fp8 or shape.kv_dtype == shape.dtype):
            return f"the kernel takes bfloat16 and caches of 16 bits or of 8-bit floats, not {shape.kv_dtype}"
        if shape.head_dim not in ((128,) if fp8 else (64, 128)):
            return f"heads are of {shape.head_dim}, the kernel takes 128, and 64 with a cache of 16 bits"
        group = shape.heads // shape.kv_heads
        if shape.kv_heads > _MOST_KV_HEADS or group > _TILE:
            return (
                f"{shape.kv_heads} key heads of {group} query heads each, the kernel takes {_MOST_KV_HEADS} of {_TILE}"
            )
        if shape.page_size % _TILE:
            return f"pages are of {shape.page_size} tokens, the kernel takes multiples of {_TILE}"
        if _page_bytes(shape) > _MOST_PAGE_BYTES:
            return f"a page of a layer has {_page_bytes(shape)} bytes, the kernel takes {_MOST_PAGE_BYTES}"
        if (wanted := _shared_bytes(shape)) > arch.shared_bytes:
            return f"a block wants {wanted} bytes of shared memory, {arch.name} has {arch.shared_bytes}"
        return arch.lacks("bulk_copy")

    def plan(self, seq_lens: Sequence[int]) -> None:
        """Do nothing: `deal` divides the work."""

    def deal(self, inputs: DecodeInputs) -> None:
        """Enqueue the division of a step's pages among multiprocessors; a graph can capture it."""
        self._module.plan(inputs.seq_lens_B, self._plan, self._shape.window or 0, self._blocks)

    def run(
        self,
        q_BHD: Tensor,
        kv_layer: Tensor,
        inputs: DecodeInputs,
        out_BHD: Tensor,
        scales: KvScales = UNSCALED,
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
            shape.window or 0,
            self._blocks,
            shape.scale * scales.k,
            scales.v,
            self._pdl,
        )
