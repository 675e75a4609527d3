"""Attention to latent vectors on the CPU: `LatentPages`, and the operations of a model that keeps such vectors.

A token of the cache is one vector [c; k_R] for all heads: scores are products with all of it, sums are of c alone.
Each token of a step attends by itself, in float32 and in products whose shapes depend on its position alone. So its
result does not depend on what is computed with it. Shape letters: C elements of c, R of k_R, D = C + R, S tokens seen.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch.nn import functional

from headrace.ops.cpu.block import CpuOps
from headrace.ops.cpu.kv import CpuKv
from headrace.ops.cpu.native.block import NativeOps
from headrace.ops.cpu.step import CpuStep
from headrace.ops.formats import Stored

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from headrace.ops.cpu.linear import CpuLinear
    from headrace.ops.cpu.native.library import Context
    from headrace.ops.cpu.products import CpuKernel
    from headrace.ops.latents import LatentWeights
    from headrace.ops.paged import PagedBatch, PageShape

__all__ = ["CpuLatents", "LatentPages", "NativeLatentOps", "TorchLatentOps"]


@dataclass(frozen=True, slots=True)
class _Row:
    """Tokens `start .. start + count` of a step, which are the last of a row's `length` tokens."""

    start: int
    count: int
    pages_P: Tensor
    length: int


@dataclass(frozen=True, slots=True, eq=False)
class _LatentStep(CpuStep):
    slots_N: Tensor
    cos_N1C: Tensor
    sin_N1C: Tensor
    rows: tuple[_Row, ...]


@dataclass(frozen=True, slots=True, eq=False)
class LatentPages:
    """Layout of the pages of latent vectors, and attention to them."""

    heads: int
    latent_dim: int
    rotated_dim: int
    page_size: int
    scale: float
    """Factor of the scores."""
    cos_PC: Tensor
    """Cosines, float32 [positions, R / 2]."""
    sin_PC: Tensor
    dtype: torch.dtype
    """Dtype of the vectors in the cache."""
    interleaved: bool
    """Whether pairs of rotated elements come side by side, not half of the rotated part apart."""

    @property
    def size(self) -> int:
        """Elements of a token's vector."""
        return self.latent_dim + self.rotated_dim

    @property
    def page_shape(self) -> PageShape:
        """Shape of what a layer keeps in a page: one vector for a token."""
        return (1, 1, self.page_size, self.size)

    def prepare(self, batch: PagedBatch) -> CpuStep:
        """Return the values that a step's layers share; raise `ValueError` unless its rows cover its tokens once."""
        batch.check_cover()
        rows = [_Row(row.start, row.count, row.pages_P, row.length) for row in batch.prefills]
        for group in batch.decodes:
            lengths = enumerate(group.lengths_R.tolist())
            rows += [_Row(group.start + row, 1, group.pages_RP[row], length) for row, length in lengths]
        cos_N1C, sin_N1C = (table[batch.positions_N].unsqueeze(1) for table in (self.cos_PC, self.sin_PC))
        tokens = len(batch.positions_N)
        return _LatentStep(tokens, batch.positions_N, batch.slots_N, cos_N1C, sin_N1C, tuple(rows))

    def attend(self, queries_NHD: Tensor, latents_ND: Tensor, step: CpuStep, kv: CpuKv, layer: int) -> Tensor:
        """Rotate, store and attend; return the weighted sums of c, [N, H, C] in the dtype of the queries.

        Values that are not finite are stored as 0, so that a failed request cannot affect a later one that uses the
        same page. Rows behind the step's tokens give zeros.
        """
        assert isinstance(step, _LatentStep)
        q_NHD = self._rotated(queries_NHD[: step.tokens], step)
        new_ND = self._rotated(latents_ND[: step.tokens].unsqueeze(1), step).squeeze(1)
        kv.slots[layer].index_copy_(0, step.slots_N, new_ND.nan_to_num_(0.0, 0.0, 0.0).to(self.dtype))
        sums_NHC = torch.empty(step.tokens, self.heads, self.latent_dim)
        for row in step.rows:
            pages_P = row.pages_P[: -(-row.length // self.page_size)]
            held_SD = kv.rows[layer].index_select(0, pages_P).view(-1, self.size).float()
            for index in range(row.count):
                seen_SD = held_SD[: row.length - row.count + index + 1]
                token = row.start + index
                weights_HS = torch.softmax((q_NHD[token] @ seen_SD.T).mul_(self.scale), -1)
                torch.mm(weights_HS, seen_SD[:, : self.latent_dim], out=sums_NHC[token])
        behind = len(queries_NHD) - step.tokens
        return functional.pad(sums_NHC, (0, 0, 0, 0, 0, behind)).to(queries_NHD.dtype)

    def _rotated(self, x_NHD: Tensor, step: _LatentStep) -> Tensor:
        """Return vectors in float32 with their last elements rotated; of each pair, the second is R / 2 behind."""
        still_NHC, turned_NHR = x_NHD.float().split((self.latent_dim, self.rotated_dim), 2)
        if self.interleaved:
            first, second = turned_NHR[..., ::2], turned_NHR[..., 1::2]
        else:
            first, second = turned_NHR.chunk(2, -1)
        cos, sin = step.cos_N1C, step.sin_N1C
        return torch.cat((still_NHC, first * cos - second * sin, second * cos + first * sin), 2)


class CpuLatents:
    """Attention of one layer to latent vectors, whose products with W_UK and W_UV are packed head by head."""

    def __init__(self, ops: CpuOps, pages: LatentPages, weights: LatentWeights, layer: int) -> None:
        """Pack `weights` for products by `ops`; `layer` is the number of the layer."""
        self._ops, self._pages, self._layer = ops, pages, layer
        self._plain_dim, self._norm_C, self._epsilon = weights.plain_dim, weights.norm_C, weights.epsilon
        up_HPC, up_HVC = weights.split()
        self._keys = [ops.pack(Stored.from_dense(up_PC.T.contiguous()), None) for up_PC in up_HPC]
        self._values = [ops.pack(Stored.from_dense(up_VC.contiguous()), None) for up_VC in up_HVC]

    def __call__(self, queries_NHX: Tensor, latents_ND: Tensor, step: CpuStep, kv: CpuKv) -> Tensor:
        """Store the tokens' vectors, attend, and return the values of all heads, [N, H * V]."""
        plain_NHP, rotated_NHR = queries_NHX.split((self._plain_dim, self._pages.rotated_dim), 2)
        turned_NHC = torch.stack(self._each(plain_NHP, self._keys, "k"), 1)
        c_NC, key_NR = latents_ND.split((self._pages.latent_dim, self._pages.rotated_dim), 1)
        normed_NC = self._ops.norm_with(c_NC, self._norm_C, self._epsilon)
        sums_NHC = self._pages.attend(
            torch.cat((turned_NHC, rotated_NHR), 2), torch.cat((normed_NC, key_NR), 1), step, kv, self._layer
        )
        return torch.cat(self._each(sums_NHC, self._values, "v"), 1)

    def _each(self, x_NHI: Tensor, packed: list[CpuLinear], site: str) -> list[Tensor]:
        """Return the product of each head with its own weight."""
        heads_HNI = x_NHI.transpose(0, 1).contiguous()
        return [
            self._ops.linear(x_NI, weight, self._layer, site) for x_NI, weight in zip(heads_HNI, packed, strict=True)
        ]


class TorchLatentOps(CpuOps):
    """The operations of one step of a model with latent vectors, by torch."""

    def __init__(self, pages: LatentPages, *, eps: float, dtype: torch.dtype, products: Sequence[CpuKernel]) -> None:
        """Take the pages; `eps` is the epsilon of the stream's norms, and the rest is that of `CpuOps`."""
        super().__init__(
            heads=pages.heads, kv_heads=1, head_dim=pages.size, page_size=pages.page_size, eps=eps, cos=pages.cos_PC,
            sin=pages.sin_PC, dtype=dtype, scale=pages.scale, products=products,
        )  # fmt: skip
        self._pages = pages

    @property
    def page_shape(self) -> PageShape:
        """Shape of what a layer keeps in a page."""
        return self._pages.page_shape

    def prepare(self, batch: PagedBatch) -> CpuStep:
        """Return the values that a step's layers share; raise `ValueError` unless its rows cover its tokens once."""
        return self._pages.prepare(batch)

    def pack_latents(self, weights: LatentWeights, layer: int) -> CpuLatents:
        """Pack a layer's attention to latent vectors."""
        return CpuLatents(self, self._pages, weights, layer)


class NativeLatentOps(NativeOps):
    """The operations of one step of a model with latent vectors, in C but for attention to these."""

    def __init__(self, context: Context, pages: LatentPages, *, eps: float, dtype: torch.dtype) -> None:
        """Take the threads and memory of `context` and the pages; the rest is that of `NativeOps`."""
        super().__init__(
            context, heads=pages.heads, kv_heads=1, head_dim=pages.size, page_size=pages.page_size, eps=eps,
            cos=pages.cos_PC, sin=pages.sin_PC, dtype=dtype, scale=pages.scale,
        )  # fmt: skip
        self._pages = pages

    @property
    def page_shape(self) -> PageShape:
        """Shape of what a layer keeps in a page."""
        return self._pages.page_shape

    def prepare(self, batch: PagedBatch) -> CpuStep:
        """Return the values that a step's layers share; raise `ValueError` unless its rows cover its tokens once."""
        step = self._pages.prepare(batch)
        self._context.kernels.headrace_step(self._context.handle, 1)
        return step

    def pack_latents(self, weights: LatentWeights, layer: int) -> CpuLatents:
        """Pack a layer's attention to latent vectors."""
        return CpuLatents(self, self._pages, weights, layer)
