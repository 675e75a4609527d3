"""Low-rank updates on the CPU: adds the adapters' products to a step's products, in place.

Owns the order of the products; never decides which token uses which adapter, and never reads one. Next to read:
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


class Wearers(NamedTuple):
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

    def __init__(self, ops: CpuOps, wearers: Sequence[Wearers]) -> None:
        """Compute with `ops` for the adapter users of a step; each token is in at most one entry of `wearers`."""
        self._ops, self._wearers = ops, wearers

    def embed(self, x_NE: Tensor, tokens_N: Tensor) -> Tensor:
        """Add the embeddings' updates to `x_NE`, put in the embeddings of virtual tokens, and return it."""
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
        """Return the product with the site's updates."""
        y_NO = packed(x_NI)
        for updates, tokens, _ in self._wearers:
            update = updates.sites.get((layer, site))
            if update is not None:
                add_update(y_NO, x_NI, tokens, update)
        return y_NO

    def add_product(
        self, x_NI: Tensor, packed: CpuLinear, residual_NE: Tensor, _norm_E: Tensor | None, layer: int, site: str
    ) -> tuple[Tensor, Tensor]:
        """Return (the product with the site's updates, the residual), for the next norm to add."""
        return self._product(x_NI, packed, layer, site), residual_NE

    def norm_product(
        self, x_NE: Tensor, residual_NE: Tensor | None, weight_E: Tensor, packed: CpuLinear, layer: int, site: str
    ) -> tuple[Tensor, Tensor]:
        """Return (product of the norm of the sum with the site's updates, the sum)."""
        normed_NE, total_NE = self._ops.normed_sum(x_NE, residual_NE, weight_E)
        return self._product(normed_NE, packed, layer, site), total_NE

    def norm_feed(
        self, x_NE: Tensor, residual_NE: Tensor | None, weight_E: Tensor, packed: CpuLinear, layer: int, site: str
    ) -> tuple[Tensor, Tensor]:
        """Return (silu(gate) * up of the norm of the sum, the sum), with the updates added before silu."""
        gate_up_N2F, total_NE = self.norm_product(x_NE, residual_NE, weight_E, packed, layer, site)
        return self._ops.silu_mul(gate_up_N2F), total_NE

    def head(self, logits_SV: Tensor, hidden_SE: Tensor) -> Tensor:
        """Add the head's updates to the logits and return them; the tokens of the wearers must index these S."""
        for updates, tokens, _ in self._wearers:
            update = updates.sites.get((-1, "head"))
            if update is not None:
                add_update(logits_SV, hidden_SE, tokens, update)
        return logits_SV
