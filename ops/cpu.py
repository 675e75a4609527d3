"""`CpuOps`: what a decoder block needs on the CPU, in few torch calls; never knows a request or a model's weights.

Each call costs microseconds and a small model has hundreds of them a step, so what all layers share (where keys and
values go, rotary factors, masks) is computed once a step by `prepare`. Shape letters are those of paged.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import rms_norm, scaled_dot_product_attention, silu

from headrace.ops.linear import CpuLinear, GroupQuantised, head_linear, make_linear
from headrace.ops.paged import DecodeGroup, PagedBatch, PrefillRow

__all__ = ["CpuKV", "CpuOps", "CpuStep"]


@dataclass(frozen=True, slots=True)
class CpuKV:
    """The paged cache: for each layer, keys then values as [2 * pages * K, T * D]."""

    layers: list[Tensor]
    num_pages: int


@dataclass(frozen=True, slots=True)
class _Decodes:
    """One group of decoding rows, as one layer kind (one window) sees it."""

    start: int
    rows: int
    index: Tensor
    """int64 [2 * R * K * P]: the cache rows to gather, keys first."""
    mask: Tensor | None
    """[R, 1, 1, P * T] in the model's dtype, 0 or -inf; None where one row sees all it gathered."""
    length: int
    """Tokens gathered for each row."""


@dataclass(frozen=True, slots=True)
class _Prefill:
    """One row that computes several tokens, as one layer kind sees it."""

    start: int
    count: int
    index: Tensor
    mask: Tensor | None
    """[count, length] in the model's dtype; None for a plain causal square."""
    length: int


@dataclass(frozen=True, slots=True)
class CpuStep:
    """What all layers of one step share."""

    cos_N1D: Tensor
    sin_N1D: Tensor
    """The first half negated, so that rotation is x * cos + roll(x) * sin."""
    targets: Tensor
    """int64 [N, 2K]: cache rows of D elements that the tokens' keys and values go to."""
    decodes: dict[int | None, list[_Decodes]]
    prefills: dict[int | None, list[_Prefill]]


class CpuOps:
    """Operations for one model's geometry."""

    def __init__(
        self,
        *,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        page_size: int,
        norm_eps: float,
        inverse_frequencies: NDArray[np.float32],
        max_positions: int,
        windows: Sequence[int | None],
        dtype: torch.dtype,
        reduced: bool,
    ) -> None:
        """Prepare the rotary table.

        Args:
            num_heads: H.
            num_kv_heads: K.
            head_dim: D.
            page_size: T.
            norm_eps: Epsilon of every RMS norm.
            inverse_frequencies: float32 [D / 2], radians per position.
            max_positions: Positions that the rotary table covers.
            windows: For each layer, how many of the last positions a token attends to; None for all.
            dtype: Of activations and of the cache.
            reduced: Whether products may use fewer bits than `dtype` has.
        """
        self._heads, self._kv_heads, self._head_dim, self._page_size = num_heads, num_kv_heads, head_dim, page_size
        self._norm_eps = norm_eps
        self._windows = tuple(windows)
        self._dtype = dtype
        self._reduced = reduced
        self._scale = head_dim**-0.5
        angles = torch.outer(torch.arange(max_positions, dtype=torch.float32), torch.from_numpy(inverse_frequencies))
        cos, sin = angles.cos(), angles.sin()
        self._cos_PD = torch.cat([cos, cos], dim=-1).to(dtype)
        self._sin_PD = torch.cat([-sin, sin], dim=-1).to(dtype)

    # -- memory -----------------------------------------------------------------------------------------------------

    def page_bytes(self, num_layers: int) -> int:
        """Bytes of one page over all layers."""
        return 2 * num_layers * self._kv_heads * self._page_size * self._head_dim * self._dtype.itemsize

    def allocate_kv(self, num_layers: int, num_pages: int) -> CpuKV:
        """A zeroed cache; the system gives its memory as pages are first written."""
        shape = (2 * num_pages * self._kv_heads, self._page_size * self._head_dim)
        return CpuKV([torch.zeros(shape, dtype=self._dtype) for _ in range(num_layers)], num_pages)

    def copy_pages(self, kv: CpuKV, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy keys and values of each (source, destination) page, in all layers."""
        heads = self._kv_heads
        for layer in kv.layers:
            pages = layer.view(2, kv.num_pages, heads * self._page_size * self._head_dim)
            for source, destination in pairs:
                pages[:, destination] = pages[:, source]

    # -- products ---------------------------------------------------------------------------------------------------

    def linear(self, weight: Tensor | GroupQuantised, bias_O: Tensor | None) -> CpuLinear:
        """The product with a weight [O, I]."""
        return make_linear(weight, bias_O)

    def head(self, weight_VE: Tensor | GroupQuantised) -> CpuLinear:
        """The product with the output head."""
        return head_linear(weight_VE, reduced=self._reduced)

    # -- a step -----------------------------------------------------------------------------------------------------

    def prepare(self, batch: PagedBatch, kv: CpuKV) -> CpuStep:
        """Compute what the layers of one step share."""
        size, heads = self._page_size, self._kv_heads
        page_N, offset_N = batch.slots_N // size, batch.slots_N % size
        head_K = torch.arange(heads)
        keys_NK = (page_N[:, None] * heads + head_K) * size + offset_N[:, None]
        kinds = set(self._windows)
        return CpuStep(
            cos_N1D=self._cos_PD[batch.positions_N].unsqueeze(1),
            sin_N1D=self._sin_PD[batch.positions_N].unsqueeze(1),
            targets=torch.cat([keys_NK, keys_NK + kv.num_pages * heads * size], dim=1),
            decodes={window: [self._decodes(group, window, kv) for group in batch.decodes] for window in kinds},
            prefills={window: [self._prefill(row, window, kv) for row in batch.prefills] for window in kinds},
        )

    def _rows(self, pages: Tensor, kv: CpuKV) -> Tensor:
        """Cache rows of `pages` [..., P], keys then values: [2, ..., K, P]."""
        keys = pages.unsqueeze(-2) * self._kv_heads + torch.arange(self._kv_heads)[:, None]
        return torch.stack([keys, keys + kv.num_pages * self._kv_heads])

    def _decodes(self, group: DecodeGroup, window: int | None, kv: CpuKV) -> _Decodes:
        size = self._page_size
        lengths_R, pages_RP = group.lengths_R, group.pages_RP
        rows, width = pages_RP.shape
        positions_RP = torch.arange(width * size)[None, :]
        if window is not None and int(lengths_R.max()) > window:
            first_R = (lengths_R - window).clamp_min(0) // size  # pages wholly before the window are not gathered
            width = int((-(-lengths_R // size) - first_R).max())
            places_RP = (first_R[:, None] + torch.arange(width)).clamp_max(pages_RP.shape[1] - 1)
            pages_RP = pages_RP.gather(1, places_RP)
            positions_RP = first_R[:, None] * size + torch.arange(width * size)
            seen = (positions_RP < lengths_R[:, None]) & (positions_RP >= lengths_R[:, None] - window)
        else:
            seen = positions_RP < lengths_R[:, None]
        index = self._rows(pages_RP, kv).reshape(-1)
        if rows == 1 and width * size >= int(lengths_R[0]):
            return _Decodes(group.start, 1, index, None, int(lengths_R[0]))
        mask = torch.zeros(seen.shape, dtype=self._dtype).masked_fill_(~seen, float("-inf"))
        return _Decodes(group.start, rows, index, mask[:, None, None], width * size)

    def _prefill(self, row: PrefillRow, window: int | None, kv: CpuKV) -> _Prefill:
        index = self._rows(row.pages_P, kv).reshape(-1)
        mask = None
        if row.count != row.length or (window is not None and row.length > window):
            query = torch.arange(row.length - row.count, row.length)[:, None]
            key = torch.arange(row.length)[None, :]
            seen = key <= query
            if window is not None:
                seen &= key > query - window
            mask = torch.zeros(seen.shape, dtype=self._dtype).masked_fill_(~seen, float("-inf"))
        return _Prefill(row.start, row.count, index, mask, row.length)

    # -- a layer ----------------------------------------------------------------------------------------------------

    def rms_norm(self, x_NE: Tensor, weight_E: Tensor) -> Tensor:
        """x / sqrt(mean(x²) + eps) * w (Zhang and Sennrich, 2019)."""
        return rms_norm(x_NE, weight_E.shape, weight_E, self._norm_eps)

    def add_rms_norm(self, x_NE: Tensor, residual_NE: Tensor, weight_E: Tensor) -> tuple[Tensor, Tensor]:
        """(norm of x + residual, x + residual); `x_NE` is overwritten."""
        residual_NE = x_NE.add_(residual_NE)
        return rms_norm(residual_NE, weight_E.shape, weight_E, self._norm_eps), residual_NE

    def silu_mul(self, gate_up_N2F: Tensor) -> Tensor:
        """silu(gate) * up; the input is overwritten."""
        gate_NF, up_NF = gate_up_N2F.chunk(2, dim=-1)
        return silu(gate_NF).mul_(up_NF)

    def rope_and_write(
        self,
        qkv_NX: Tensor,
        step: CpuStep,
        kv: CpuKV,
        layer: int,
        q_norm_D: Tensor | None,
        k_norm_D: Tensor | None,
    ) -> Tensor:
        """Norm and rotate queries and keys, and write keys and values to their pages.

        Args:
            qkv_NX: [N, (H + 2K) * D], overwritten.
            step: From `prepare`.
            kv: The cache.
            layer: Which layer's cache.
            q_norm_D: RMS norm over each query head, if the model has one.
            k_norm_D: The same for key heads.

        Returns:
            Queries [N, H, D].
        """
        heads, kv_heads, dim = self._heads, self._kv_heads, self._head_dim
        qkv_NXD = qkv_NX.view(len(qkv_NX), heads + 2 * kv_heads, dim)
        turned_NXD = qkv_NXD[:, : heads + kv_heads]
        if q_norm_D is not None and k_norm_D is not None:
            q_NHD, k_NKD = turned_NXD[:, :heads], turned_NXD[:, heads:]
            q_NHD.copy_(rms_norm(q_NHD, q_norm_D.shape, q_norm_D, self._norm_eps))
            k_NKD.copy_(rms_norm(k_NKD, k_norm_D.shape, k_norm_D, self._norm_eps))
        rolled = turned_NXD.roll(dim // 2, -1).mul_(step.sin_N1D)
        turned_NXD.mul_(step.cos_N1D).add_(rolled)
        kv.layers[layer].view(-1, dim).index_put_((step.targets,), qkv_NXD[:, heads:])
        return qkv_NXD[:, :heads]

    def attention(self, q_NHD: Tensor, step: CpuStep, kv: CpuKV, layer: int) -> Tensor:
        """softmax(q kᵀ / sqrt(D)) v over each token's context, [N, H * D]."""
        window = self._windows[layer]
        cache = kv.layers[layer]
        out_NHD = torch.empty(q_NHD.shape, dtype=q_NHD.dtype)
        for group in step.decodes[window]:
            rows = slice(group.start, group.start + group.rows)
            self._attend_decodes(q_NHD[rows], group, cache, out_NHD[rows])
        for row in step.prefills[window]:
            tokens = slice(row.start, row.start + row.count)
            self._attend_prefill(q_NHD[tokens], row, cache, out_NHD[tokens])
        return out_NHD.view(len(out_NHD), -1)

    def _attend_decodes(self, q_RHD: Tensor, group: _Decodes, cache: Tensor, out_RHD: Tensor) -> None:
        rows, kv_heads, dim = group.rows, self._kv_heads, self._head_dim
        gathered = cache.index_select(0, group.index)
        if group.mask is None:
            k, v = gathered.view(2, 1, kv_heads, -1, dim)[:, :, :, : group.length].unbind(0)
            q = q_RHD.reshape(1, kv_heads, -1, dim)  # a group's heads act as queries of one position
            out_RHD.copy_(scaled_dot_product_attention(q, k, v, scale=self._scale).view(out_RHD.shape))
            return
        k, v = gathered.view(2, rows * kv_heads, -1, dim).unbind(0)
        q = q_RHD.reshape(rows * kv_heads, -1, dim)
        scores = torch.bmm(q, k.transpose(1, 2)).mul_(self._scale).view(rows, kv_heads, -1, group.length)
        weights = scores.add_(group.mask).softmax(-1).view(rows * kv_heads, -1, group.length)
        torch.bmm(weights, v, out=out_RHD.view(rows * kv_heads, -1, dim))

    def _attend_prefill(self, q_CHD: Tensor, row: _Prefill, cache: Tensor, out_CHD: Tensor) -> None:
        kv_heads, dim = self._kv_heads, self._head_dim
        groups = self._heads // kv_heads
        gathered = cache.index_select(0, row.index).view(2, kv_heads, 1, -1, dim)[:, :, :, : row.length]
        k, v = gathered.expand(2, kv_heads, groups, row.length, dim).unbind(0)
        q = q_CHD.transpose(0, 1).view(kv_heads, groups, row.count, dim)
        out = scaled_dot_product_attention(q, k, v, row.mask, is_causal=row.mask is None, scale=self._scale)
        out_CHD.copy_(out.reshape(self._heads, row.count, dim).transpose(0, 1))
