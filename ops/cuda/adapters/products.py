"""`CudaAdapterOps`: a step's products on CUDA with the low-rank updates of the adapters that its tokens use.

Owns the order of the launches and their fusion: an update is added in place where the next kernel is attention or the
output head, or before silu(gate) * up, before the next norm, or within the product. Never picks adapters. Next to read:
rows.py.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Final, NamedTuple

import torch

from headrace.ops.cuda.adapters.alike import expand_alike, shrink_alike
from headrace.ops.cuda.adapters.expand import expand, expand_add_norm, expand_silu_mul
from headrace.ops.cuda.adapters.rows import ALIKE, SEGMENT, LoraBatch, LoraSite
from headrace.ops.cuda.adapters.shrink import look_up, shrink
from headrace.ops.cuda.adapters.vector_expand import Waiting, norm_shrink, vector_linear_expand
from headrace.ops.cuda.adapters.vector_shrink import vector_linear_shrink
from headrace.ops.cuda.hazards import Launch, Thing
from headrace.ops.cuda.products.linear import MAX_ROWS
from headrace.ops.stream import Stream

if TYPE_CHECKING:
    from torch import Tensor

    from headrace.ops.cuda.attention.steps import CudaKv, CudaStep
    from headrace.ops.cuda.block import CudaOps
    from headrace.ops.cuda.products.packed import CudaProduct
    from headrace.ops.stream import HeadNorms

__all__ = ["CudaAdapterOps", "VirtualRows"]


_EARLY: Final = frozenset[Thing](("adapters", "weights"))
"""What every kernel here reads before it waits: adapters with their places, and weights, those of norms included."""


class VirtualRows(NamedTuple):
    """Embeddings that replace those of a step's tokens from `first` on (prompt tuning, Lester et al., 2021)."""

    first: int
    given_ME: Tensor


class LateUpdate(NamedTuple):
    """Update of the product that made `Stream.x_NE`, which a kernel adds beside the next norm."""

    waiting: Waiting
    batch: LoraBatch
    ops: CudaOps
    launch: Launch

    def normed(self, x_NE: Tensor, total_NE: Tensor, norm_E: Tensor, eps: float) -> Tensor:
        """Add x and its update to `total_NE`, and write the norm of the sum into `x_NE`."""
        low, site = self.waiting
        self.ops.note(self.launch)
        expand_add_norm(low, x_NE, total_NE, norm_E, eps, self.batch, site, pdl=self.ops.pdl)
        return x_NE


class CudaAdapterOps:
    """The operations of one step in which tokens use adapters; an update may be added by the norm after its product."""

    def __init__(
        self,
        ops: CudaOps,
        batch: LoraBatch,
        sites: Mapping[tuple[int, str], LoraSite],
        *,
        feeds: bool = True,
        ends: bool = False,
        virtual: Sequence[VirtualRows] = (),
        side: torch.cuda.Stream | None = None,
    ) -> None:
        """Compute with `ops`.

        Args:
            ops: The operations of the layers' mixer.
            batch: The adapter of each token.
            sites: The sites by (layer, name), with (-1, "embed") and (-1, "head").
            feeds: Whether an adapter in use updates gate, up or down.
            ends: Whether an adapter in use updates the embeddings or the output head.
            virtual: Embeddings that are given for tokens of the step.
            side: Stream that computes x A^T beside products of few rows; None to compute it before them.
        """
        self._ops, self._batch, self._sites = ops, batch, sites
        self._feeds, self._ends, self._virtual = feeds, ends, virtual
        self._side = side
        self._alike = batch.rows == ALIKE
        self._update = Launch("an adapter's update", ops.pdl, _EARLY, frozenset(("activations",)))
        self._waits = len(batch.slots_N) <= ops.arch.tuning.update_norm_rows and batch.rows != SEGMENT

    def embed(self, x_NE: Tensor, tokens_N: Tensor) -> Tensor:
        """Add the embeddings' updates to `x_NE`, put in the embeddings of virtual tokens, and return it."""
        x_NE = self._ops.embed(x_NE, tokens_N)
        if self._ends:
            place = self._sites[-1, "embed"]
            expand(look_up(tokens_N, self._batch, place), x_NE, self._batch, place)
        for first, given_ME in self._virtual:
            x_NE[first : first + len(given_ME)] = given_ME
        return x_NE

    def attend(
        self,
        stream: Stream,
        norm_E: Tensor,
        qkv: CudaProduct,
        head_norms: HeadNorms | None,
        step: CudaStep,
        kv: CudaKv,
        layer: int,
    ) -> tuple[Tensor, Tensor]:
        """Do what `CudaOps.attend` does, with the updates of queries, keys and values."""
        place = self._sites[layer, "qkv"]
        if self._is_one(stream.x_NE, qkv) and len(place.sizes_out) > 1:
            qkv_NX, total_NE = self._one(stream, norm_E, qkv, place, gated=False)
            qkv_NX = qkv_NX if qkv.bias_O is None else qkv_NX.add_(qkv.bias_O)
        else:
            normed_NE, total_NE = self.normed(stream, norm_E)
            qkv_NX, low = self._with_low(normed_NE, qkv, place)
            self._expand(low, qkv_NX, place)
        return self._ops.attend_with(qkv_NX, head_norms, step, kv, layer), total_NE

    def feed(self, stream: Stream, norm_E: Tensor, gate_up: CudaProduct, layer: int) -> tuple[Tensor, Tensor]:
        """Do what `CudaOps.feed` does, with the updates of gate and up."""
        x_NE = stream.x_NE
        if stream.pending is None and not self._feeds:
            return self._ops.feed(stream, norm_E, gate_up, layer)
        if self._feeds and gate_up.bias_O is None and self._is_one(x_NE, gate_up):
            return self._one(stream, norm_E, gate_up, self._sites[layer, "gate_up"], gated=True)
        normed_NE, total_NE = self.normed(stream, norm_E)
        if not self._feeds:
            return self._ops.gated(normed_NE, gate_up), total_NE
        place = self._sites[layer, "gate_up"]
        gate_up_N2F, low = self._with_low(normed_NE, gate_up, place)
        self._ops.note(self._update)
        rows, size = gate_up_N2F.shape
        out_NF = torch.empty(rows, size // 2, dtype=x_NE.dtype, device=x_NE.device)
        if self._alike:
            expand_alike(low, gate_up_N2F, out_NF, self._batch, place, gated=True, pdl=self._ops.pdl)
        else:
            expand_silu_mul(low, gate_up_N2F, out_NF, self._batch, place, pdl=self._ops.pdl)
        return out_NF, total_NE

    def add(
        self, x_NI: Tensor, packed: CudaProduct, total_NE: Tensor, norm_E: Tensor | None, layer: int, site: str
    ) -> Stream:
        """Return the stream with the product added; the next norm, if there is one, adds the site's updates."""
        if site == "down" and not self._feeds:
            return Stream(self._ops.product(x_NI, packed), total_NE)
        place = self._sites[layer, site]
        y_NO, low = self._with_low(x_NI, packed, place)
        if self._waits and norm_E is not None:
            return Stream(y_NO, total_NE, LateUpdate(Waiting(low, place), self._batch, self._ops, self._update))
        self._expand(low, y_NO, place)
        return Stream(y_NO, total_NE)

    def attend_with(
        self,
        qkv_NX: Tensor,
        head_norms: HeadNorms | None,
        step: CudaStep,
        kv: CudaKv,
        layer: int,
    ) -> Tensor:
        """Do what `CudaOps.attend_with` does."""
        return self._ops.attend_with(qkv_NX, head_norms, step, kv, layer)

    def linear(self, x_NI: Tensor, packed: CudaProduct, layer: int, site: str) -> Tensor:
        """Return x W^T + b, with the site's updates if adapters have such a site."""
        place = self._sites.get((layer, site))
        if place is None or (site in ("gate_up", "down") and not self._feeds):
            return self._ops.product(x_NI, packed)
        y_NO, low = self._with_low(x_NI, packed, place)
        self._expand(low, y_NO, place)
        return y_NO

    def summed(self, stream: Stream) -> tuple[Tensor, Tensor]:
        """Do what `CudaOps.summed` does."""
        return self._ops.summed(stream)

    def normed(self, stream: Stream, norm_E: Tensor) -> tuple[Tensor, Tensor]:
        """Do what `CudaOps.normed` does."""
        return self._ops.normed(stream, norm_E)

    def logits(self, x_SE: Tensor, head: CudaProduct) -> Tensor:
        """Return the logits with the head's updates; the batch must be that of the S tokens."""
        logits_SV = self._ops.logits(x_SE, head)
        if self._ends:
            place = self._sites[-1, "head"]
            self._ops.note(self._update)
            low = shrink(x_SE, self._batch, place, pdl=self._ops.pdl)
            expand(low, logits_SV, self._batch, place, pdl=self._ops.pdl)
        return logits_SV

    def _is_one(self, x_NI: Tensor, packed: CudaProduct) -> bool:
        """Return whether the kernels for one row can compute the product."""
        return len(x_NI) == 1 and self._batch.rows == 1 and packed.weight_OI is not None

    def _one(
        self, stream: Stream, norm_E: Tensor, packed: CudaProduct, site: LoraSite, *, gated: bool
    ) -> tuple[Tensor, Tensor]:
        """Return (product of one row's norm of the sum with the site's updates, gated or not, the sum)."""
        ops, (x_1E, total_1E, pending) = self._ops, stream
        assert packed.weight_OI is not None
        waiting = pending.waiting if isinstance(pending, LateUpdate) else None
        ops.note(self._update)
        row = norm_shrink(x_1E, total_1E, norm_E, self._batch, site, waiting, pdl=ops.pdl)
        size_out = packed.size_out // 2 if gated else packed.size_out
        out_1O = torch.empty(1, size_out, dtype=x_1E.dtype, device=x_1E.device)
        vector_linear_expand(row, packed.weight_OI, out_1O, ops.eps, self._batch, site, gated=gated, pdl=ops.pdl)
        return out_1O, row.total_1E

    def _with_low(self, x_NI: Tensor, packed: CudaProduct, site: LoraSite) -> tuple[Tensor, Tensor]:
        """Return (x W^T + b, x A^T)."""
        if self._is_one(x_NI, packed):
            assert packed.weight_OI is not None
            y_1O = torch.empty(1, packed.size_out, dtype=x_NI.dtype, device=x_NI.device)
            self._ops.note(self._update)
            low = vector_linear_shrink(x_NI, packed.weight_OI, y_1O, self._batch, site, pdl=self._ops.pdl)
            return y_1O if packed.bias_O is None else y_1O.add_(packed.bias_O), low
        if self._side is None or len(x_NI) > MAX_ROWS:
            self._ops.note(self._update)
            low = shrink(x_NI, self._batch, site, pdl=self._ops.pdl)
            return self._ops.product(x_NI, packed), low
        stream = torch.cuda.current_stream()
        self._side.wait_stream(stream)
        with torch.cuda.stream(self._side):
            low = (shrink_alike if self._alike else shrink)(x_NI, self._batch, site)
        y_NO = self._ops.product(x_NI, packed)
        stream.wait_stream(self._side)
        return y_NO, low

    def _expand(self, low: Tensor, y_NO: Tensor, site: LoraSite) -> None:
        """Compute `y += t B` in place."""
        self._ops.note(self._update)
        if self._alike:
            expand_alike(low, y_NO, y_NO, self._batch, site, pdl=self._ops.pdl)
        else:
            expand(low, y_NO, self._batch, site, pdl=self._ops.pdl)
