"""`GroupQuantised`: a weight in 4-bit groups as files hold it, whatever the device; never packs it for a product."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

__all__ = ["BLOCK_OUTS", "GROUP", "GroupQuantised", "row_blocks"]

GROUP = 32
"""Inputs that share one scale and one minimum."""
BLOCK_OUTS = 64
"""Outputs in one block of the CPU's packed 4-bit layout; blocks lie one after the other."""
_BLOCK_ELEMENTS = 1 << 16  # float32 elements: an eighth or less of a core's cache


@dataclass(frozen=True, slots=True, eq=False)
class GroupQuantised:
    """A weight in 4-bit groups along its inputs: `w = values * scale + minimum`, exact for GGUF Q4_0 and Q4_1."""

    values_OI: Tensor
    """Quantised values from 0 to 15, uint8."""
    scale_OG: Tensor
    """Scale of each group of `GROUP` inputs, float32."""
    minimum_OG: Tensor
    """Minimum of each group of `GROUP` inputs, float32."""

    def __post_init__(self) -> None:
        """Raise `ValueError` unless the groups cover the inputs exactly."""
        outs, ins = self.values_OI.shape
        expected = (outs, ins // GROUP)
        if ins % GROUP or self.scale_OG.shape != expected or self.minimum_OG.shape != expected:
            raise ValueError(
                f"values {outs}x{ins} need scales and minimums of {outs}x{ins / GROUP:g}, "
                f"got {tuple(self.scale_OG.shape)} and {tuple(self.minimum_OG.shape)}"
            )

    @staticmethod
    def cat(parts: Sequence[GroupQuantised]) -> GroupQuantised:
        """Stack weights that read the same inputs along their outputs, in order."""
        return GroupQuantised(
            torch.cat([part.values_OI for part in parts]),
            torch.cat([part.scale_OG for part in parts]),
            torch.cat([part.minimum_OG for part in parts]),
        )

    def dense(self, dtype: torch.dtype) -> Tensor:
        """Return the weight as a float matrix `[out, in]`, computed in float32 and rounded once."""
        dense_OI = torch.empty(self.values_OI.shape, dtype=dtype)
        blocks = row_blocks(self.values_OI)
        shape = (min(blocks[0].stop, len(dense_OI)), self.scale_OG.shape[1], GROUP) if blocks else (0,)
        scratch_OGg = torch.empty(shape)  # one buffer for all blocks: the system would zero the pages of each new one
        for rows in blocks:
            values_OI = self.values_OI[rows]
            block_OGg = scratch_OGg[: len(values_OI)]
            block_OGg.copy_(values_OI.view(block_OGg.shape))
            block_OGg.mul_(self.scale_OG[rows].unsqueeze(-1)).add_(self.minimum_OG[rows].unsqueeze(-1))
            dense_OI[rows].copy_(block_OGg.flatten(1))
        return dense_OI


def row_blocks(weight_OI: Tensor) -> list[slice]:
    """Return slices of a matrix's rows that are small enough to stay in a core's cache while they are worked on."""
    outs, ins = weight_OI.shape
    rows = -(-_BLOCK_ELEMENTS // (ins * BLOCK_OUTS)) * BLOCK_OUTS
    return [slice(first, first + rows) for first in range(0, outs, rows)]
