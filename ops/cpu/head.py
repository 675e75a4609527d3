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

from headrace.ops.cpu.linear import linear
from headrace.ops.quantised import GroupQuantised

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import Tensor

__all__ = ["CpuHead"]

# Rounding moves a logit by at most 2^-8 of itself, so the largest is always among those within 2^-7 of the largest.
_NEAR = 1 / 64
_MOST = 64  # logits of a row: if more are that close, as in a model of zeros, their order means nothing


class CpuHead:
    """Output head of one model."""

    def __init__(self, weight_VE: Tensor | GroupQuantised, *, dtype: torch.dtype) -> None:
        """Pack the weight for products with activations in `dtype`.

        With bfloat16 the plain weight is kept, too, since rows cannot be read from the packed one. For a tied head this
        is the embedding table, which costs nothing more; for any other head it costs the weight's memory.
        """
        self._product = linear(weight_VE, None, dtype=dtype)
        self._weight_VE = weight_VE if dtype is torch.bfloat16 else None

    def __call__(self, x_SE: Tensor) -> Tensor:
        """Return float32 logits [S, V] of `x_SE`, which has the head's dtype."""
        logits_SV = self._product(x_SE).float()
        if self._weight_VE is not None:
            self._refine(logits_SV.numpy(), x_SE)
        return logits_SV

    def _refine(self, logits_SV: NDArray[np.float32], x_SE: Tensor) -> None:
        """Compute the logits near the largest of each row in float32, in place and all in one product."""
        ids_of = [_near_largest(row_V) for row_V in logits_SV]
        rows_K = np.repeat(np.arange(len(ids_of)), [len(ids) for ids in ids_of])
        ids_K = np.concatenate(ids_of)
        x_KE = x_SE.index_select(0, torch.from_numpy(rows_K))
        logits_SV[rows_K, ids_K] = (self._rows(torch.from_numpy(ids_K)).mul_(x_KE)).sum(-1).numpy()

    def _rows(self, ids_K: Tensor) -> Tensor:
        """Return some rows of the weight in float32."""
        weight = self._weight_VE
        if isinstance(weight, GroupQuantised):
            parts = (each.index_select(0, ids_K) for each in (weight.values_OI, weight.scale_OG, weight.minimum_OG))
            return GroupQuantised(*parts).dense(torch.float32)
        assert weight is not None
        return weight.index_select(0, ids_K).float()


def _near_largest(row_V: NDArray[np.float32]) -> NDArray[np.int64]:
    """Return the ids of the logits near the largest; none if the largest is not finite, or if there are too many."""
    largest = float(row_V.max())
    ids_K = np.flatnonzero(row_V >= largest - _NEAR * abs(largest)) if math.isfinite(largest) else np.arange(0)
    return ids_K if len(ids_K) <= _MOST else ids_K[:0]
