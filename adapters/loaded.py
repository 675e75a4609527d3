"""`LoadedAdapter`: one adapter in host memory, ready to be copied to a device; holds tensors and never a file."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from headrace.adapters.layout import BlockLayout
from headrace.adapters.stored import Recipe, Stored

__all__ = ["LoadedAdapter", "Stamp"]


class Stamp(NamedTuple):
    """Evidence that an adapter's files are those that were read before: identity, size and times of each."""

    files: tuple[tuple[int, int, int, int, int], ...]
    digest: bytes
    """Digest of the bytes that were read."""
    recipe: Recipe | None = None
    """The recipe that made the adapter, kept for the next reading; None for virtual tokens."""


@dataclass(frozen=True, slots=True, eq=False)
class LoadedAdapter:
    """An adapter's weights, all finite, in the dtype of the device's arithmetic. Two of the same digest are equal."""

    layout: BlockLayout
    block: Tensor | Stored
    """[layout.elements]: the low-rank updates, or the stored bytes that they are made from, whose heads are in the
    order of the file."""
    virtual_PE: Tensor | None
    """Prompt tuning: [P, E], embeddings of the virtual tokens before every prompt."""
    prefix_LPsD: Tensor | None
    """Prefix tuning: [layers, P, 2 * K, D], the virtual tokens' keys after rotation, then their values."""
    digest: bytes
    """Digest of the layout, the updates and the virtual tokens."""
    stamp: Stamp | None = None
    """The stamp of the adapter's files; None where they were too young to tell a later change by."""

    @property
    def virtual_tokens(self) -> int:
        """Number of virtual tokens before every prompt."""
        if self.prefix_LPsD is not None:
            return self.prefix_LPsD.shape[1]
        return 0 if self.virtual_PE is None else len(self.virtual_PE)

    @property
    def nbytes(self) -> int:
        """Bytes of the weights on a device."""
        return self.block.nbytes + self._virtual_bytes

    @property
    def host_bytes(self) -> int:
        """Bytes of host memory that the weights take."""
        block = self.block
        held = sum(piece.nbytes for piece in block.pieces) if isinstance(block, Stored) else block.nbytes
        return held + self._virtual_bytes

    @property
    def _virtual_bytes(self) -> int:
        return sum(part.nbytes for part in (self.virtual_PE, self.prefix_LPsD) if part is not None)
