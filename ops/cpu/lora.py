"""Low-rank updates on the CPU: a step's products with those of the adapters that its tokens wear, added in place.

Owns the order of the products; never decides which token wears what and never reads an adapter. Next to read:
engine/model/cpu/adapters.py.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

if TYPE_CHECKING:
    from torch import Tensor

    from headrace.ops.cpu.block import CpuOps
    from headrace.ops.cpu.linear import CpuLinear

__all__ = ["CpuAdapterOps", "CpuUpdates", "Place", "SiteUpdate", "UpdatePart", "Wearers", "add_update"]

Place: TypeAlias = tuple[int, str]
"""A site of a layer; (-1, "head") for the output head."""


class UpdatePart(NamedTuple):
    """One module of a site: columns `first .. first + out` of the product, from ranks `start .. start + r`."""

    start: int
    first: int
    b_RO: Tensor


class SiteUpdate(NamedTuple):
    """All modules of one site: y += (x A^T) B for each of its columns."""

    a_IR: Tensor
    """The modules' A, stacked and transposed."""
    parts: tuple[UpdatePart, ...]


@dataclass(frozen=True, slots=True, eq=False)
class CpuUpdates:
    """One adapter as the CPU multiplies by it: updates in float32, virtual tokens in the dtype of activations."""

    sites: Mapping[Place, SiteUpdate]
    embedding: tuple[Tensor, Tensor] | None = None
    """A [V, r], one row a token id, and B [r, E]."""
    virtual_PE: Tensor | None = None
    """Embeddings of the virtual tokens at positions 0 .. P."""


class Wearers(NamedTuple):
    """The tokens of a step that wear one adapter."""

    updates: CpuUpdates
    tokens: slice | Tensor
    """int64 where they do not lie side by side."""
    positions_M: Tensor
    """int64: of each of them in its own sequence."""


def add_update(y_NO: Tensor, x_NI: Tensor, tokens: slice | Tensor, update: SiteUpdate) -> None:
    """y[tokens] += (x[tokens] A^T) B, module by module, in place.

    In float32, whatever y is: for a few tokens torch's products of bfloat16 take ten times as long to begin.
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
    """The products of one step in which tokens wear adapters."""

    def __init__(self, ops: CpuOps, wearers: Sequence[Wearers]) -> None:
        """Take the step's wearers; each token is in at most one of them."""
        self._ops, self._wearers = ops, wearers

    def embed(self, x_NE: Tensor, tokens_N: Tensor) -> Tensor:
        """Embeddings with their updates; those of virtual tokens replace the model's."""
        for updates, tokens, positions_M in self._wearers:
            if updates.embedding is not None:
                a_VR, b_RE = updates.embedding
                x_NE[tokens] += (a_VR[tokens_N[tokens]] @ b_RE).to(x_NE.dtype)
            if updates.virtual_PE is not None:
                virtual_M = positions_M < len(updates.virtual_PE)
                worn_ME = x_NE[tokens]  # a copy where the tokens are scattered
                worn_ME[virtual_M] = updates.virtual_PE[positions_M[virtual_M]]
                x_NE[tokens] = worn_ME
        return x_NE

    def _product(self, x_NI: Tensor, packed: CpuLinear, layer: int, site: str) -> Tensor:
        """The product with the site's updates."""
        y_NO = packed(x_NI)
        for updates, tokens, _ in self._wearers:
            update = updates.sites.get((layer, site))
            if update is not None:
                add_update(y_NO, x_NI, tokens, update)
        return y_NO

    def add_product(
        self, x_NI: Tensor, packed: CpuLinear, residual_NE: Tensor, _norm_E: Tensor | None, layer: int, site: str
    ) -> tuple[Tensor, Tensor]:
        """(the product with the site's updates, the residual): what the next norm takes."""
        return self._product(x_NI, packed, layer, site), residual_NE

    def norm_product(
        self, x_NE: Tensor, residual_NE: Tensor | None, weight_E: Tensor, packed: CpuLinear, layer: int, site: str
    ) -> tuple[Tensor, Tensor]:
        """(product of the norm of the sum with the site's updates, the sum)."""
        normed_NE, total_NE = self._ops.normed_sum(x_NE, residual_NE, weight_E)
        return self._product(normed_NE, packed, layer, site), total_NE

    def norm_feed(
        self, x_NE: Tensor, residual_NE: Tensor | None, weight_E: Tensor, packed: CpuLinear, layer: int, site: str
    ) -> tuple[Tensor, Tensor]:
        """(silu(gate) * up of the norm of the sum, the sum), the updates added before silu."""
        gate_up_N2F, total_NE = self.norm_product(x_NE, residual_NE, weight_E, packed, layer, site)
        return self._ops.silu_mul(gate_up_N2F), total_NE

    def head(self, logits_SV: Tensor, hidden_SE: Tensor) -> Tensor:
        """The logits with the head's updates; the wearers are those of the S tokens."""
        for updates, tokens, _ in self._wearers:
            update = updates.sites.get((-1, "head"))
            if update is not None:
                add_update(logits_SV, hidden_SE, tokens, update)
        return logits_SV
