"""Low-rank updates on the CPU: adds the adapters' products to a step's products, in place.

Owns the order of the products; never decides which token uses which adapter, and never reads one. Next to read:
engine/model/cpu/adapters.py.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

from headrace.ops.stream import Stream

if TYPE_CHECKING:
    from torch import Tensor

    from headrace.ops.cpu.block import CpuOps
    from headrace.ops.cpu.kv import CpuKv
    from headrace.ops.cpu.linear import CpuLinear
    from headrace.ops.cpu.step import CpuStep
    from headrace.ops.stream import HeadNorms

__all__ = ["CpuAdapterOps", "CpuUpdates", "Place", "SiteUpdate", "UpdatePart", "AdapterUsers", "add_update"]

Place: TypeAlias = tuple[int, str]
"""(layer, site) of a product; (-1, "head") for the output head."""


class UpdatePart(NamedTuple):
    """One module of a site: its columns `first .. first + out` of the product and its ranks `start .. start + r`."""

    start: int
    first: int
    b_RO: Tensor


class SiteUpdate(NamedTuple):
    """All modules of one site: y += (x A^T) B for the columns of each."""

    a_IR: Tensor
    """A of all modules, stacked and transposed: [I, R]."""
    parts: tuple[UpdatePart, ...]


@dataclass(frozen=True, slots=True, eq=False)
class CpuUpdates:
    """One adapter in the form for products on a CPU: updates in float32, virtual tokens in the dtype of activations."""

    sites: Mapping[Place, SiteUpdate]
    embedding: tuple[Tensor, Tensor] | None = None
    """A [V, r], with one row for each token id, and B [r, E]."""
    virtual_PE: Tensor | None = None
    """Embeddings of the virtual tokens at positions 0 .. P - 1."""


class AdapterUsers(NamedTuple):
    """The tokens of a step that use one adapter."""

    updates: CpuUpdates
    tokens: slice | Tensor
    """Indices among the step's tokens: int64 unless they are consecutive."""
    positions_M: Tensor
    """Position of each of these tokens in its own sequence, int64."""


def add_update(y_NO: Tensor, x_NI: Tensor, tokens: slice | Tensor, update: SiteUpdate) -> None:
    """Add (x[tokens] A^T) B to y[tokens], module by module, in place.

    Products are computed in float32 whatever the dtype of y: for a few tokens, torch's overhead for bfloat16 is ten
    times as high.
    """
    low_MR = x_NI[tokens].float() @ update.a_IR
    for start, first, b_RO in update.parts:
        ranks, outputs = b_RO.shape
        part_MR = low_MR[:, start : start + ranks]
        columns_NO = y_NO[:, first : first + outputs]
        if not isinstance(tokens, slice):
            columns_NO.index_add_(0, tokens, (part_MR @ b_RO).to(y_NO.dtype))
        elif y_NO.dtype is b_RO.dtype:
            columns_NO[tokens].addmm_(part_MR, b_RO)
        else:
            columns_NO[tokens].add_(part_MR @ b_RO)


class CpuAdapterOps:
    """The products of one step in which tokens use adapters."""

    def __init__(self, ops: CpuOps, users: Sequence[AdapterUsers]) -> None:
        """Compute with `ops` for the adapter users of a step; each token is in at most one entry of `users`."""
        self._ops, self._users = ops, users

    def embed(self, x_NE: Tensor, tokens_N: Tensor) -> Tensor:
        """Add the embeddings' updates to `x_NE`, put in the embeddings of virtual tokens, and return it."""
        x_NE = self._ops.embed(x_NE, tokens_N)
        for updates, tokens, positions_M in self._users:
            if updates.embedding is not None:
                a_VR, b_RE = updates.embedding
                x_NE[tokens] += (a_VR[tokens_N[tokens]] @ b_RE).to(x_NE.dtype)
            if updates.virtual_PE is not None:
                virtual_M = positions_M < len(updates.virtual_PE)
                worn_ME = x_NE[tokens]  # a copy where the tokens are scattered
                worn_ME[virtual_M] = updates.virtual_PE[positions_M[virtual_M]]
                x_NE[tokens] = worn_ME
        return x_NE

    def attend(
        self,
        stream: Stream,
        norm_E: Tensor,
        qkv: CpuLinear,
        head_norms: HeadNorms | None,
        step: CpuStep,
        kv: CpuKv,
        layer: int,
    ) -> tuple[Tensor, Tensor]:
        """Do what `CpuOps.attend` does, with the updates of queries, keys and values."""
        normed_NE, total_NE = self._ops.normed(stream, norm_E)
        qkv_NX = self.linear(normed_NE, qkv, layer, "qkv")
        return self._ops.attend_with(qkv_NX, head_norms, step, kv, layer), total_NE

    def feed(self, stream: Stream, norm_E: Tensor, gate_up: CpuLinear, layer: int) -> tuple[Tensor, Tensor]:
        """Do what `CpuOps.feed` does, with the updates added before silu."""
        normed_NE, total_NE = self._ops.normed(stream, norm_E)
        return self._ops.activate(self.linear(normed_NE, gate_up, layer, "gate_up"), "silu"), total_NE

    def add(
        self, x_NI: Tensor, packed: CpuLinear, total_NE: Tensor, _norm_E: Tensor | None, layer: int, site: str
    ) -> Stream:
        """Return the product with the site's updates and the sum so far, which the next norm adds."""
        return Stream(self.linear(x_NI, packed, layer, site), total_NE)

    def attend_with(self, qkv_NX: Tensor, head_norms: HeadNorms | None, step: CpuStep, kv: CpuKv, layer: int) -> Tensor:
        """Do what `CpuOps.attend_with` does."""
        return self._ops.attend_with(qkv_NX, head_norms, step, kv, layer)

    def linear(self, x_NI: Tensor, packed: CpuLinear, layer: int, site: str) -> Tensor:
        """Return the product with the site's updates."""
        y_NO = self._ops.linear(x_NI, packed, layer, site)
        for updates, tokens, _ in self._users:
            update = updates.sites.get((layer, site))
            if update is not None:
                add_update(y_NO, x_NI, tokens, update)
        return y_NO

    def summed(self, stream: Stream) -> tuple[Tensor, Tensor]:
        """Do what `CpuOps.summed` does."""
        return self._ops.summed(stream)

    def normed(self, stream: Stream, norm_E: Tensor) -> tuple[Tensor, Tensor]:
        """Do what `CpuOps.normed` does."""
        return self._ops.normed(stream, norm_E)

    def logits(self, x_SE: Tensor, head: CpuLinear) -> Tensor:
        """Return the head's product with its updates, float32; the tokens of the users must index these S rows."""
        return self.linear(x_SE, head, -1, "head")
