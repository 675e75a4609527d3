"""Paged attention on CUDA through FlashInfer: two ways to decode, one to prefill; never writes keys or values.

Decode is driven by the device: a graph reads page numbers and lengths that `prepare_decode` (fused.py) derives.
`XqaDecode` needs nothing from the host. `PlannedDecode` (FA2, tensor cores) divides work by lengths that the host plans
with; these may be upper bounds, since the kernel stops at the device's lengths. Shape letters as in `ops/paged.py`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from flashinfer import BatchDecodeWithPagedKVCacheWrapper, BatchPrefillWithPagedKVCacheWrapper
from flashinfer.xqa import xqa

from headrace.ops.paged import UNSCALED, KvScales

if TYPE_CHECKING:
    from torch import Tensor

    from headrace.ops.cuda.arch import Arch
    from headrace.ops.cuda.attention.shape import HeadShape
    from headrace.ops.cuda.fused import DecodeInputs

__all__ = ["FlashAttention", "PlannedDecode", "XqaDecode"]

_SEMAPHORES = 1 << 20
_RING = 4


class XqaDecode:
    """FlashInfer's XQA, which needs no plan. Splits each row's context evenly, whatever its length."""

    def __init__(self, shape: HeadShape, device: torch.device, *, max_rows: int, arch: Arch, spread: int = 1) -> None:
        """Allocate for `max_rows`; `spread` multiplies the splits of a row, for more balance but more merging."""
        self._shape = shape
        self._semaphores = torch.zeros(
            max(_SEMAPHORES, 4 * max_rows * shape.kv_heads), dtype=torch.uint8, device=device
        )
        self._sms = spread * arch.processors
        # Partial results of every split: rows * kv heads * splits is close to the number of multiprocessors.
        group = max(32, shape.heads // shape.kv_heads)
        splits = 2 * self._sms + max_rows * shape.kv_heads
        self._scratch = torch.empty(splits * group * (4 * shape.head_dim + 64), dtype=torch.uint8, device=device)

    def deal(self, inputs: DecodeInputs) -> None:
        """Do nothing: XQA divides each row by itself."""

    def run(
        self,
        q_BHD: Tensor,
        kv_layer: Tensor,
        inputs: DecodeInputs,
        out_BHD: Tensor,
        scales: KvScales = UNSCALED,
        sinks_H: Tensor | None = None,
    ) -> None:
        """Enqueue one layer without sinks; `inputs.seq_lens_B` is read as uint32."""
        assert sinks_H is None
        shape = self._shape
        rows = q_BHD.shape[0]
        xqa(
            q_BHD.view(rows, 1, shape.heads, shape.head_dim),
            kv_layer[:, 0],
            kv_layer[:, 1],
            inputs.pages_BP,
            inputs.seq_lens_B.view(torch.uint32).view(rows, 1),
            out_BHD.view(rows, 1, shape.heads, shape.head_dim),
            self._scratch,
            self._semaphores.view(torch.uint32),
            shape.kv_heads,
            shape.page_size,
            # XQA divides by sqrt(D) itself, and multiplies scores and outputs by one kv_scale.
            q_scale=shape.scale * math.sqrt(shape.head_dim) * scales.k / scales.v,
            kv_scale=scales.v,
            sliding_win_size=0 if shape.window is None else shape.window,
            sm_count=self._sms,
        )


class PlannedDecode:
    """FlashInfer's FA2 tensor-core decode for one batch size, in a graph; work is balanced by planned lengths.

    The page table `[B, P]` is itself the kernel's index list: row b starts at b * P, and its last page holds
    `seq_len - (P - 1) * T` tokens, a negative number whose unsigned sum is the true length. So the device's lengths
    count, and a plan for lengths that are too long only leaves some of its parts empty.
    """

    INT_WORKSPACE = 1 << 20
    """Size of `int_workspace` in bytes."""

    def __init__(
        self, shape: HeadShape, inputs: DecodeInputs, workspace: Tensor, int_workspace: Tensor | None = None
    ) -> None:
        """Plan for the rows of `inputs`; all batch sizes of one stream may share `workspace` (uint8, zeros at first).

        The size of `workspace` is `workspace_bytes`. Layers and batch sizes may share `int_workspace`, too, if each
        launch has its own plan.
        """
        self._shape = shape
        rows, columns = inputs.pages_BP.shape
        device = workspace.device
        indptr = torch.arange(rows + 1, dtype=torch.int32, device=device) * columns
        self._wrapper: Any = BatchDecodeWithPagedKVCacheWrapper(
            workspace,
            "NHD",
            use_cuda_graph=True,
            use_tensor_cores=True,
            paged_kv_indptr_buffer=indptr,
            paged_kv_indices_buffer=inputs.pages_BP.view(-1),
            paged_kv_last_page_len_buffer=inputs.tails_B,
            backend="fa2",
        )
        if int_workspace is None:
            int_workspace = torch.empty(self.INT_WORKSPACE, dtype=torch.uint8, device=device)
        self._int = int_workspace
        self._ring = [torch.empty(int_workspace.shape[0], dtype=torch.uint8, pin_memory=True) for _ in range(_RING)]
        self._done = [torch.cuda.Event() for _ in range(_RING)]
        self._turn = 0
        self._queries = torch.arange(rows + 1, dtype=torch.int32)
        self._indptr = torch.zeros(rows + 1, dtype=torch.int32)
        self._lengths = torch.ones(rows, dtype=torch.int32)
        self._first_plan(rows, columns)

    @staticmethod
    def workspace_bytes(shape: HeadShape, max_rows: int, arch: Arch) -> int:
        """Return the bytes of float workspace that any plan of up to `max_rows` rows can need."""
        parts = 2 * arch.processors // shape.kv_heads
        group = shape.heads // shape.kv_heads
        tile = 16 if group <= 16 else 64
        parts = max(parts, -(-max_rows * group // tile) + max_rows)
        return parts * shape.heads * tile * (shape.head_dim + 1) * 4 + 4096

    def _first_plan(self, rows: int, columns: int) -> None:
        shape, wrapper = self._shape, self._wrapper
        wrapper._int_workspace_buffer = self._int
        wrapper._pin_memory_int_workspace_buffer = self._ring[0]
        kept = wrapper._paged_kv_indptr_buf.clone()
        pages = torch.zeros(rows, dtype=torch.int32)
        wrapper.plan(
            torch.arange(rows + 1, dtype=torch.int32),
            pages,
            torch.ones(rows, dtype=torch.int32),
            shape.heads,
            shape.kv_heads,
            shape.head_dim,
            shape.page_size,
            window_left=self._window_left,
            q_data_type=shape.dtype,
            kv_data_type=shape.kv_dtype,
            sm_scale=shape.scale,
            logits_soft_cap=shape.cap,
        )
        wrapper._paged_kv_indptr_buf.copy_(kept)
        torch.cuda.current_stream().synchronize()
        self.plan([min(2, columns) * shape.page_size] * rows)

    @property
    def _window_left(self) -> int:
        return -1 if self._shape.window is None else self._shape.window - 1

    def plan(self, seq_lens: Sequence[int]) -> None:
        """Plan the next launch; blocks only while the plan made four plans ago has not reached the device."""
        shape = self._shape
        slot = self._turn % _RING
        self._turn += 1
        self._done[slot].synchronize()
        lengths = torch.as_tensor(seq_lens, dtype=torch.int32)
        self._lengths.copy_(lengths)
        torch.cumsum((lengths + (shape.page_size - 1)) // shape.page_size, 0, dtype=torch.int32, out=self._indptr[1:])
        rows = len(lengths)
        self._wrapper._cached_module.plan(
            self._wrapper._float_workspace_buffer,
            self._int,
            self._ring[slot],
            self._queries,
            self._indptr,
            self._lengths,
            rows,
            rows,
            shape.heads,
            shape.kv_heads,
            shape.page_size,
            True,
            shape.head_dim,
            shape.head_dim,
            False,
            self._window_left,
            -1,
            False,
            0,
            0,
        )
        self._done[slot].record()

    def deal(self, inputs: DecodeInputs) -> None:
        """Do nothing: `plan` divides the work."""

    def run(
        self,
        q_BHD: Tensor,
        kv_layer: Tensor,
        inputs: DecodeInputs,
        out_BHD: Tensor,
        scales: KvScales = UNSCALED,
        sinks_H: Tensor | None = None,
    ) -> None:
        """Enqueue one layer without sinks; `inputs` must be the ones given at construction."""
        assert sinks_H is None
        self._wrapper.run(q_BHD, kv_layer, out=out_BHD, k_scale=scales.k, v_scale=scales.v)


class FlashAttention:
    """Attention of prefills, causal, over pages that already hold the new tokens: FlashInfer's FA2 or FA3."""

    def __init__(
        self, shape: HeadShape, device: torch.device, *, backend: str = "fa2", workspace: Tensor | None = None
    ):
        """Allocate; nothing else may use `workspace`, uint8, between `plan` and the last `run` of a step."""
        self._shape = shape
        if workspace is None:
            workspace = torch.zeros(128 << 20, dtype=torch.uint8, device=device)
        self._wrapper: Any = BatchPrefillWithPagedKVCacheWrapper(workspace, "NHD", backend=backend)
        size = self._wrapper._int_workspace_buffer.shape[0]
        self._ring = [torch.empty(size, dtype=torch.uint8, pin_memory=True) for _ in range(_RING)]
        self._done = [torch.cuda.Event() for _ in range(_RING)]
        self._turn = 0

    def plan(self, counts: Sequence[int], lengths: Sequence[int], pages: Sequence[Sequence[int]]) -> None:
        """Plan a step on the current stream.

        Args:
            counts: New tokens of each row; queries are packed in this order.
            lengths: Context length of each row, the new tokens included.
            pages: Page numbers of each row, at least as many as its length needs.
        """
        shape = self._shape
        slot = self._turn % _RING
        self._turn += 1
        self._done[slot].synchronize()
        self._wrapper._pin_memory_int_workspace_buffer = self._ring[slot]
        used = [-(-length // shape.page_size) for length in lengths]
        starts = torch.tensor([0, *counts], dtype=torch.int32).cumsum(0, dtype=torch.int32)
        indptr = torch.tensor([0, *used], dtype=torch.int32).cumsum(0, dtype=torch.int32)
        indices = torch.tensor(
            [page for row, many in zip(pages, used, strict=True) for page in row[:many]], dtype=torch.int32
        )
        last = torch.tensor([(length - 1) % shape.page_size + 1 for length in lengths], dtype=torch.int32)
        self._wrapper.plan(
            starts,
            indptr,
            indices,
            last,
            shape.heads,
            shape.kv_heads,
            shape.head_dim,
            shape.page_size,
            causal=True,
            sm_scale=shape.scale,
            logits_soft_cap=shape.cap,
            window_left=-1 if shape.window is None else shape.window - 1,
            q_data_type=shape.dtype,
            kv_data_type=shape.kv_dtype,
        )
        self._done[slot].record()

    def run(
        self,
        q_NHD: Tensor,
        kv_layer: Tensor,
        out_NHD: Tensor,
        scales: KvScales = UNSCALED,
        sinks_H: Tensor | None = None,
    ) -> None:
        """Enqueue one layer without sinks; `q_NHD` may be a view into packed q, k, v (last dimension contiguous)."""
        assert sinks_H is None
        self._wrapper.run(q_NHD, kv_layer, out=out_NHD, k_scale=scales.k, v_scale=scales.v)
