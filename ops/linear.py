"""Matrix products with a fixed weight on the CPU, in the format that is fastest for the number of rows.

Owns the weight in one or two formats; never knows which layer it belongs to. With W [O, I] and x [N, I]: y = x Wᵀ + b.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import linear as dense_linear

__all__ = ["CpuLinear", "GroupQuantised", "head_linear", "make_linear"]

GROUP = 32
_PACKED_ROWS = 16  # from here on the bfloat16 product is faster than the 4-bit one (docs/performance.md)
_INT8_ROWS = 8


@dataclass(frozen=True, slots=True)
class GroupQuantised:
    """A weight in 4 bits: w = value * scale + minimum, in groups of 32 along the inputs (GGUF Q4_0 and Q4_1, exactly)."""

    values_OI: Tensor
    """uint8 [O, I], 0 to 15."""
    scale_OG: Tensor
    """float32 [O, I / 32]."""
    minimum_OG: Tensor
    """float32 [O, I / 32]."""

    @staticmethod
    def cat(parts: Sequence[GroupQuantised]) -> GroupQuantised:
        """Stack weights of the same inputs, one above the other."""
        return GroupQuantised(
            torch.cat([part.values_OI for part in parts]),
            torch.cat([part.scale_OG for part in parts]),
            torch.cat([part.minimum_OG for part in parts]),
        )

    def dense(self, dtype: torch.dtype) -> Tensor:
        """The weight [O, I] in `dtype`."""
        rows, columns = self.values_OI.shape
        grouped = self.values_OI.view(rows, -1, GROUP) * self.scale_OG[:, :, None] + self.minimum_OG[:, :, None]
        return grouped.view(rows, columns).to(dtype)


class CpuLinear:
    """A dense product: y = x Wᵀ + b in the weight's dtype."""

    def __init__(self, weight_OI: Tensor, bias_O: Tensor | None) -> None:
        """Keep the weight as it is."""
        self._weight_OI = weight_OI
        self._bias_O = bias_O

    def __call__(self, x_NI: Tensor) -> Tensor:
        """[N, O] in the dtype of `x_NI`."""
        return dense_linear(x_NI, self._weight_OI, self._bias_O)


class _PackedLinear(CpuLinear):
    """A 4-bit weight for few rows, its bfloat16 form for many."""

    def __init__(self, weight: GroupQuantised, bias_O: Tensor | None) -> None:
        super().__init__(weight.dense(torch.bfloat16), bias_O)
        self._packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(weight.values_OI.int(), 1)
        zero_OG = weight.minimum_OG + 8 * weight.scale_OG  # the kernel computes (value - 8) * scale + zero
        self._scales_GO2 = torch.stack([weight.scale_OG.T, zero_OG.T], dim=-1).bfloat16().contiguous()

    def __call__(self, x_NI: Tensor) -> Tensor:
        if len(x_NI) > _PACKED_ROWS:
            return super().__call__(x_NI)
        y_NO: Tensor = torch.ops.aten._weight_int4pack_mm_for_cpu(x_NI, self._packed, GROUP, self._scales_GO2)
        return y_NO if self._bias_O is None else y_NO.add_(self._bias_O)


class _Int8Head(CpuLinear):
    """An output head that is also kept in 8 bits, one scale a row, for few positions."""

    def __init__(self, weight_OI: Tensor) -> None:
        super().__init__(weight_OI, None)
        scale_O = (weight_OI.abs().amax(dim=1).float() / 127).clamp_min(1e-12)
        self._values_OI = (weight_OI.float() / scale_O[:, None]).round_().to(torch.int8)
        self._scale_O = scale_O.bfloat16()

    def __call__(self, x_NI: Tensor) -> Tensor:
        if len(x_NI) > _INT8_ROWS:
            return super().__call__(x_NI)
        y_NO: Tensor = torch.ops.aten._weight_int8pack_mm(x_NI, self._values_OI, self._scale_O)
        return y_NO


def make_linear(weight: Tensor | GroupQuantised, bias_O: Tensor | None) -> CpuLinear:
    """The product with `weight`, 4-bit where it comes that way."""
    if isinstance(weight, GroupQuantised):
        return _PackedLinear(weight, bias_O)
    return CpuLinear(weight, bias_O)


def head_linear(weight_VE: Tensor | GroupQuantised, *, reduced: bool) -> CpuLinear:
    """The output head; `reduced` allows 8 bits."""
    if isinstance(weight_VE, GroupQuantised):
        return _PackedLinear(weight_VE, None)
    return _Int8Head(weight_VE) if reduced else CpuLinear(weight_VE, None)
