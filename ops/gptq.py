"""`gptq`: quantises a dense weight by the inputs that it multiplies; each column's error goes into the columns left.

Frantar et al., "GPTQ: Accurate Post-Training Quantization for Generative Pre-trained Transformers" (2022, arXiv
2210.17323), with a damping of 1 % of the mean of the Hessian's diagonal. Columns are rounded in the order of their
entries on that diagonal, the largest first, to the scales and zero points of the groups' extremes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, Literal

import torch

from headrace.ops.formats import Stored
from headrace.ops.quantise import quantise
from headrace.ops.quantised import IntGroups, pack_nibbles

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["DAMPING", "Hessian", "gptq"]

DAMPING: Final = 0.01
"""Share of the mean of the Hessian's diagonal that is added to all of the diagonal."""
_BLOCK: Final = 128
"""Columns after which the columns to the right of them are brought up to date at once."""


class Hessian:
    """The second derivative of a product's squared error, but for a factor: the sum of x x^T over all its inputs x."""

    def __init__(self, size: int, device: torch.device) -> None:
        """Start without inputs; each will have `size` elements."""
        self.sum_II = torch.zeros(size, size, dtype=torch.float32, device=device)
        """The sum so far, float32 [in, in]."""

    def add(self, x_NI: Tensor) -> None:
        """Add N inputs, in float32."""
        self.sum_II.addmm_(x_NI.T, x_NI)


def gptq(weight: Stored, hessian: Hessian, method: Literal["int8", "int4"], *, symmetric: bool = False) -> Stored:
    """Return a dense matrix [out, in] quantised, on its own device, so that its products with the inputs change little.

    The format, the scales and the zero points are those of `quantise` that refines nothing; only the codes are others.
    So a matrix whose inputs are no whole groups stays dense here, too.

    Raises:
        ValueError: The Hessian is not finite.
    """
    start = quantise(weight, method, symmetric=symmetric, refine=False)
    if not isinstance(start.format, IntGroups):
        return start
    order_I = hessian.sum_II.diagonal().argsort(descending=True, stable=True)
    factor_II = _factor(hessian.sum_II.double()[order_I][:, order_I])
    left_OI = weight.parts["values"].float()[:, order_I]
    codes_OI = torch.empty(left_OI.shape, dtype=torch.uint8, device=left_OI.device)
    scale_OI, zero_OI = _grid(start, order_I)
    for first in range(0, left_OI.shape[1], _BLOCK):
        here, after = slice(first, first + _BLOCK), slice(first + _BLOCK, None)
        codes_OI[:, here], errors_OB = _rounded(
            left_OI[:, here], scale_OI[:, here], zero_OI[:, here], factor_II[here, here], (1 << start.format.bits) - 1
        )
        left_OI[:, after] -= errors_OB @ factor_II[here, after]
    values = torch.empty_like(codes_OI)
    values[:, order_I] = codes_OI
    if start.format.bits == 4:
        values = pack_nibbles(values)
    return Stored(start.format, start.shape, {**start.parts, "values": values})


def _factor(hessian_II: Tensor) -> Tensor:
    """Return the upper Cholesky factor of the damped Hessian's inverse, float32: its rows spread the errors."""
    damping = DAMPING * float(hessian_II.diagonal().mean())
    if not torch.isfinite(hessian_II).all():
        raise ValueError("the Hessian is not finite")
    hessian_II.diagonal().add_(damping or 1.0)  # without any input but zeros, plain rounding
    inverse_II = torch.cholesky_inverse(torch.linalg.cholesky(hessian_II))
    factor_II: Tensor = torch.linalg.cholesky(inverse_II, upper=True)
    return factor_II.float()


def _grid(stored: Stored, order_I: Tensor) -> tuple[Tensor, Tensor]:
    """Return scale and zero point of each element, float32 [out, in], with the columns in `order_I`."""
    assert isinstance(stored.format, IntGroups)
    group_I = order_I // (stored.format.group or stored.shape[-1])
    scale_OI = stored.parts["scale"].float()[:, group_I]
    if stored.format.zeros:
        return scale_OI, stored.parts["zero"].float()[:, group_I]
    return scale_OI, torch.full_like(scale_OI, 1 << (stored.format.bits - 1))


def _rounded(left_OB: Tensor, scale_OB: Tensor, zero_OB: Tensor, factor_BB: Tensor, top: int) -> tuple[Tensor, Tensor]:
    """Return (codes uint8 [out, B], errors [out, B] in units of the factor's diagonal) of the columns of a block."""
    left_BO, scale_BO, zero_BO = (each.T.contiguous() for each in (left_OB, scale_OB, zero_OB))
    codes_BO, errors_BO = torch.empty_like(left_BO), torch.empty_like(left_BO)
    for column, (left_O, scale_O, zero_O) in enumerate(zip(left_BO, scale_BO, zero_BO, strict=True)):
        codes_BO[column] = (left_O / scale_O + zero_O).round_().clamp_(0, top)
        error_O = left_O - (codes_BO[column] - zero_O) * scale_O
        errors_BO[column] = error_O / factor_BB[column, column]
        left_BO[column + 1 :].addr_(factor_BB[column, column + 1 :], errors_BO[column], alpha=-1.0)
    return codes_BO.T.to(torch.uint8), errors_BO.T
