"""`CpuHead`: the output head on the CPU, with logits in float32; never chooses a token.

In torch, the product of bfloat16 matrices is bfloat16, whose step is 0.125 from 16 on: two tokens 0.08 apart tie, and
the last bit of an input decides between them. A second product for the lost bits would read the weight twice. So only
the few logits near the largest of each row, where rounding decides, are computed once more in float32.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np
import torch

from headrace.ops.cpu.linear import KeptWeight
from headrace.ops.cpu.products import PRODUCTS, kept_by, pack_product

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray
    from torch import Tensor

    from headrace.ops.cpu.products import CpuKernel
    from headrace.ops.formats import Stored

__all__ = ["CpuHead"]

# Rounding moves a logit by at most 2^-8 of itself, so the largest is always among those within 2^-7 of the largest.
_NEAR = 1 / 64
_MOST = 64  # logits of a row: if more are that close, as in a model of zeros, their order means nothing


class CpuHead:
    """Output head of one model."""

    def __init__(self, weight_VE: Stored, *, dtype: torch.dtype, products: Sequence[CpuKernel] = PRODUCTS) -> None:
        """Pack the weight for products with activations in `dtype`, by the first of `products` that can.

        With bfloat16 the stored weight is kept, too, since rows cannot be read from the packed one. For a tied head
        that is the embedding table, which costs nothing more; for any other head it costs the weight's memory.
        """
        self._product = pack_product(weight_VE, None, dtype=dtype, products=products)
        self._weight_VE = weight_VE if dtype is torch.bfloat16 else None

    @staticmethod
    def kept(weight_VE: Stored, *, dtype: torch.dtype, products: Sequence[CpuKernel] = PRODUCTS) -> list[KeptWeight]:
        """Return what a head keeps of a weight, which may lie on the meta device; the arguments are those of a head."""
        kept = kept_by(weight_VE, dtype, products)
        if dtype is not torch.bfloat16 or any(each.is_shared for each in kept):
            return kept
        return [*kept, KeptWeight(weight_VE.format.name, weight_VE.nbytes, is_shared=True)]

    def __call__(self, x_SE: Tensor) -> Tensor:
        """Return float32 logits [S, V] of `x_SE`, which has the head's dtype."""
        logits_SV = self._product(x_SE).float()
        if self._weight_VE is not None:
            self._refine(self._weight_VE, logits_SV.numpy(), x_SE)
        return logits_SV

    @staticmethod
    def _refine(weight_VE: Stored, logits_SV: NDArray[np.float32], x_SE: Tensor) -> None:
        """Compute the logits near the largest of each row in float32, in place and all in one product."""
        ids_of = [_near_largest(row_V) for row_V in logits_SV]
        rows_K = np.repeat(np.arange(len(ids_of)), [len(ids) for ids in ids_of])
        ids_K = np.concatenate(ids_of)
        x_KE = x_SE.index_select(0, torch.from_numpy(rows_K))
        weight_KE = weight_VE.rows(torch.from_numpy(ids_K), torch.float32)
        logits_SV[rows_K, ids_K] = weight_KE.mul_(x_KE).sum(-1).numpy()


def _near_largest(row_V: NDArray[np.float32]) -> NDArray[np.int64]:
    """Return the ids of the logits near the largest; none if the largest is not finite, or if there are too many."""
    largest = float(row_V.max())
    ids_K = np.flatnonzero(row_V >= largest - _NEAR * abs(largest)) if math.isfinite(largest) else np.arange(0)
    return ids_K if len(ids_K) <= _MOST else ids_K[:0]
