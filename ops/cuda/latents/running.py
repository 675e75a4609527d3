"""`LatentDecode` and `LatentPrefill`: attention to latent vectors, planned and launched; attend.py has the kernels.

Shape letters as in `ops/latents.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
import triton

from headrace.ops.cuda.attention.tiles import PlanRing
from headrace.ops.cuda.latents.attend import LatentTiling, Parts, attend_decode, attend_prefill
from headrace.ops.paged import UNSCALED, KvScales

if TYPE_CHECKING:
    from torch import Tensor

    from headrace.ops.cuda.arch import Arch
    from headrace.ops.cuda.fused import DecodeInputs
    from headrace.ops.cuda.latents.shape import LatentShape

__all__ = ["LatentDecode", "LatentPrefill", "decode_tiling", "parts_of", "prefill_tiling"]

_MOST_SPLITS = 64
_WIDE_BYTES = 150 << 10
"""Fewest bytes of shared memory that a block must have for 64 queries of 576 elements beside their tiles."""
_ROOMY_BYTES = 190 << 10
"""Fewest bytes for another tile beside these."""


def decode_tiling(shape: LatentShape, arch: Arch) -> LatentTiling:
    """Return how decodes are cut: as many heads at once as a program has room for, so that few read a vector again."""
    if shape.heads <= 16:
        return LatentTiling(lanes=16, tile=32, warps=4, stages=4)
    if arch.shared_bytes < _WIDE_BYTES or shape.heads <= 32:
        return LatentTiling(lanes=32, tile=32, warps=8, stages=4)
    return LatentTiling(lanes=64, tile=32, warps=8, stages=4)


def prefill_tiling(arch: Arch) -> LatentTiling:
    """Return how prefills are cut."""
    if arch.shared_bytes < _WIDE_BYTES:
        return LatentTiling(lanes=32, tile=32, warps=8, stages=4)
    return LatentTiling(lanes=64, tile=32, warps=8, stages=5 if arch.shared_bytes >= _ROOMY_BYTES else 4)


def parts_of(shape: LatentShape, arch: Arch, tiling: LatentTiling, rows: int, memory: Tensor) -> Parts:
    """Return into how many shares the rows of a batch are cut, and the room for what these leave.

    Args:
        shape: The sizes.
        arch: The GPU.
        tiling: How the work is cut.
        rows: Number of rows.
        memory: What `LatentDecode.memory` returns.
    """
    programs = arch.tuning.latent_programs // (rows * triton.cdiv(shape.heads, tiling.lanes))
    splits = min(_MOST_SPLITS, 1 << max(programs, 1).bit_length() - 1)
    scores = rows * shape.heads * splits
    return Parts(memory[scores:], memory[:scores], splits, 1) if splits > 1 else Parts(memory, memory, 1, 1)


class LatentDecode:
    """Attention of one token of each row. No plan: shares follow the device's lengths."""

    def __init__(self, shape: LatentShape, *, rows: int, arch: Arch, memory: Tensor, pdl: bool = False) -> None:
        """Attend for `rows` rows; batches of other sizes may share `memory`, since no two of them run at once."""
        self._shape, self._pdl, self._tiling = shape, pdl, decode_tiling(shape, arch)
        self._parts = parts_of(shape, arch, self._tiling, rows, memory)

    @staticmethod
    def memory(shape: LatentShape, arch: Arch, device: torch.device) -> Tensor:
        """Return room for the parts of any batch, float32."""
        blocks = triton.cdiv(shape.heads, decode_tiling(shape, arch).lanes)
        most = max(1, arch.tuning.latent_programs // blocks) * shape.heads
        return torch.empty(most * (shape.latent_dim + 1), dtype=torch.float32, device=device)

    @property
    def launches(self) -> int:
        """Number of kernels of a layer."""
        return 2 if self._parts.splits > 1 else 1

    def deal(self, inputs: DecodeInputs) -> None:
        """Do nothing: programs find their shares by the lengths."""

    def run(
        self,
        q_BHD: Tensor,
        kv_layer: Tensor,
        inputs: DecodeInputs,
        out_BHD: Tensor,
        scales: KvScales = UNSCALED,
        sinks_H: Tensor | None = None,
    ) -> None:
        """Enqueue one layer: `kv_layer` is `[pages, T, D]`, and the output has C elements for each head."""
        assert sinks_H is None
        attend_decode(
            q_BHD, kv_layer, inputs.seq_lens_B, inputs.pages_BP, out_BHD, self._parts, self._shape, self._tiling,
            pdl=self._pdl,
        )  # fmt: skip


class LatentPrefill:
    """Attention of prefills to pages that already hold the new tokens: `plan` once for each step, then `run`."""

    def __init__(self, shape: LatentShape, device: torch.device, *, arch: Arch, pdl: bool = False) -> None:
        """Attend with queries of `shape`; `pdl` is whether to use programmatic dependent launch."""
        self._shape, self._pdl, self._tiling = shape, pdl, prefill_tiling(arch)
        self._ring = PlanRing(device)
        self._jobs_J4 = self._pages = torch.empty(0, dtype=torch.int32, device=device)

    def plan(self, counts: Sequence[int], lengths: Sequence[int], pages: Sequence[Sequence[int]]) -> None:
        """Plan a step on the current stream, the jobs with the longest context first.

        Args:
            counts: New tokens of each row; queries are packed in this order.
            lengths: Context length of each row, the new tokens included.
            pages: Page numbers of each row, at least as many as its length needs.
        """
        heads, most = self._shape.heads, self._tiling.lanes
        counts_W, lengths_W = np.array(counts), np.array(lengths)
        jobs_W = -(-counts_W * heads // most)
        row_J = np.arange(len(counts_W)).repeat(jobs_W)
        done_J = (np.arange(len(row_J)) - (jobs_W.cumsum() - jobs_W)[row_J]) * most
        before_W, used_W = counts_W.cumsum() - counts_W, -(-lengths_W // self._shape.page_size)
        count_J = np.minimum(counts_W[row_J] * heads - done_J, most)
        first_J = before_W[row_J] * heads + done_J
        offset_J = (lengths_W - counts_W - before_W)[row_J] + 1
        page_J = (used_W.cumsum() - used_W)[row_J]
        order = np.argsort(-((first_J + count_J - 1) // heads + offset_J), kind="stable")
        jobs_J4 = np.stack((first_J, count_J, offset_J, page_J), 1)[order]
        used = (row[:count] for row, count in zip(pages, used_W, strict=True))
        sent = self._ring.send(np.concatenate([jobs_J4.ravel(), *used]))
        self._jobs_J4, self._pages = sent[: jobs_J4.size].view(-1, 4), sent[jobs_J4.size :]

    def run(
        self,
        q_NHD: Tensor,
        kv_layer: Tensor,
        out_NHD: Tensor,
        scales: KvScales = UNSCALED,
        sinks_H: Tensor | None = None,
    ) -> None:
        """Enqueue one layer: `kv_layer` is `[pages, T, D]`, and the output has C elements for each head."""
        assert sinks_H is None
        attend_prefill(
            q_NHD, kv_layer, self._jobs_J4, self._pages, out_NHD, self._shape, self._tiling, pdl=self._pdl
        )  # fmt: skip
