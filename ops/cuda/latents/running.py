"""`LatentDecode` and `LatentPrefill`: attention to latent vectors, planned and launched; attend.py has the kernels.

Shape letters as in `ops/latents.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
import torch
import triton

from headrace.ops.cuda.attention.tiles import PlanRing
from headrace.ops.cuda.latents.attend import LatentTiling, Parts, attend_decode, attend_prefill
from headrace.ops.cuda.latents.expand import attend_expanded
from headrace.ops.paged import UNSCALED, KvScales

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import Tensor

    from headrace.ops.cuda.arch import Arch
    from headrace.ops.cuda.fused import DecodeInputs
    from headrace.ops.cuda.latents.shape import LatentShape

    _Numbers: TypeAlias = NDArray[np.int64]

__all__ = ["LatentDecode", "LatentPrefill", "decode_tiling", "expanded_tiling", "parts_of", "prefill_tiling"]

_MOST_SPLITS = 128
_WIDE_BYTES = 150 << 10
"""Fewest bytes of shared memory that a block must have for 64 queries of 576 elements beside their tiles."""
_WIDE_KEYS = 384
"""Most elements of a key and a value of one head for tiles of 64 of them."""


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
    if arch.has("wgmma"):
        return LatentTiling(lanes=64, tile=64, warps=8, stages=3)
    return LatentTiling(lanes=64, tile=32, warps=8, stages=4)


def expanded_tiling(arch: Arch, elements: int = 0) -> LatentTiling:
    """Return how whole prompts are cut, of whose keys and values those of one head have `elements` together."""
    tile = 64 if arch.shared_bytes >= _WIDE_BYTES and elements <= _WIDE_KEYS else 32
    wide = arch.shared_bytes >= _WIDE_BYTES
    return LatentTiling(lanes=128 if wide else 64, tile=tile, warps=8 if wide else 4, stages=3 if tile == 64 else 2)


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
    """Attention of prefills to pages that already hold the new tokens: `plan` once for each step, then `run`.

    Where all rows begin in the step, `run_whole` attends to keys and values that were made of their vectors, instead.
    """

    def __init__(self, shape: LatentShape, device: torch.device, *, arch: Arch, pdl: bool = False) -> None:
        """Attend with queries of `shape`; `pdl` is whether to use programmatic dependent launch."""
        self._shape, self._arch, self._pdl, self._tiling = shape, arch, pdl, prefill_tiling(arch)
        self._ring = PlanRing(device)
        self._jobs_J4 = self._pages = torch.empty(0, dtype=torch.int32, device=device)
        self._whole_J3: Tensor | None = None

    @property
    def is_whole(self) -> bool:
        """Whether every row of the step that was planned last begins in it."""
        return self._whole_J3 is not None

    def plan(self, counts: Sequence[int], lengths: Sequence[int], pages: Sequence[Sequence[int]]) -> None:
        """Plan a step on the current stream, the jobs with the longest context first.

        Args:
            counts: New tokens of each row; queries are packed in this order.
            lengths: Context length of each row, the new tokens included.
            pages: Page numbers of each row, at least as many as its length needs.
        """
        heads, counts_W, lengths_W = self._shape.heads, np.array(counts), np.array(lengths)
        before_W, used_W = counts_W.cumsum() - counts_W, -(-lengths_W // self._shape.page_size)
        row_J, done_J, count_J = _pieces(counts_W * heads, self._tiling.lanes)
        first_J = before_W[row_J] * heads + done_J
        offset_J = (lengths_W - counts_W - before_W)[row_J] + 1
        page_J = (used_W.cumsum() - used_W)[row_J]
        order = np.argsort(-((first_J + count_J - 1) // heads + offset_J), kind="stable")
        jobs_J4 = np.stack((first_J, count_J, offset_J, page_J), 1)[order]
        whole_J3 = np.empty((0, 3), np.int64)
        if is_whole := bool((counts_W == lengths_W).all()):
            row_J, done_J, count_J = _pieces(counts_W, expanded_tiling(self._arch).lanes)
            order = np.argsort(-(done_J + count_J), kind="stable")
            whole_J3 = np.stack((before_W[row_J], before_W[row_J] + done_J, count_J), 1)[order]
        used = (row[:count] for row, count in zip(pages, used_W, strict=True))
        sent = self._ring.send(np.concatenate([jobs_J4.ravel(), whole_J3.ravel(), *used]))
        jobs, whole = jobs_J4.size, jobs_J4.size + whole_J3.size
        self._jobs_J4, self._pages = sent[:jobs].view(-1, 4), sent[whole:]
        self._whole_J3 = sent[jobs:whole].view(-1, 3) if is_whole else None

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

    def run_whole(
        self, plain_NHP: Tensor, rotated_NHR: Tensor, up_NX: Tensor, keys_NR: Tensor, out_NHV: Tensor
    ) -> None:
        """Enqueue one layer of rows that begin in the step; the arguments are those of `attend_expanded`."""
        assert self._whole_J3 is not None
        elements = up_NX.shape[1] // self._shape.heads + self._shape.rotated_dim
        attend_expanded(
            plain_NHP, rotated_NHR, up_NX, keys_NR, self._whole_J3, out_NHV, expanded_tiling(self._arch, elements),
            scale=self._shape.scale, pdl=self._pdl,
        )  # fmt: skip


def _pieces(counts_W: _Numbers, most: int) -> tuple[_Numbers, _Numbers, _Numbers]:
    """Return by piece of rows of so many its row, what of the row lies before it, and its length, at most `most`."""
    pieces_W = -(-counts_W // most)
    row_J = np.arange(len(counts_W)).repeat(pieces_W)
    done_J = (np.arange(len(row_J)) - (pieces_W.cumsum() - pieces_W)[row_J]) * most
    return row_J, done_J, np.minimum(counts_W[row_J] - done_J, most)
