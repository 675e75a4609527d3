"""`gptq`: quantises a dense weight by the inputs that it multiplies; each column's error goes into the columns left.

Frantar et al., "GPTQ: Accurate Post-Training Quantization for Generative Pre-trained Transformers" (2022, arXiv
2210.17323). Columns are rounded in the order of their entries on the Hessian's diagonal, the largest first; groups stay
those of neighbouring inputs. Scales and zero points of groups are chosen before that. Each column's squared errors then
count by what the columns that are rounded later cannot make up for.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import torch

from headrace.ops.formats import Stored
from headrace.ops.quantise import Method, format_for, quantise
from headrace.ops.quantised import Fp8, IntGroups, pack_nibbles

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["DAMPING", "Hessian", "gptq"]

DAMPING: Final = 0.05
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


def gptq(
    weight: Stored, hessian: Hessian, method: Method, *, symmetric: bool = False, group: int | None = None
) -> Stored:
    """Return a dense matrix [out, in] quantised, on its own device, so that its products with the inputs change little.

    The format is that of `quantise`, and so are the scales of 8 bits. A matrix whose inputs are no whole groups stays
    dense here, too.

    Raises:
        ValueError: The Hessian is not finite.
    """
    format = format_for(method, weight.shape[-1], symmetric=symmetric, group=group)
    if format is None:
        return weight
    order_I = hessian.sum_II.diagonal().argsort(descending=True, stable=True)
    factor_II = _factor(hessian.sum_II.double()[order_I][:, order_I])
    importance_I = torch.empty_like(factor_II[0])
    importance_I[order_I] = factor_II.diagonal().square().reciprocal_()
    start = quantise(weight, method, symmetric=symmetric, group=group, importance_I=importance_I)
    left_OI = weight.parts["values"].float()[:, order_I]
    codes_OI = torch.empty_like(left_OI)
    scale_OI, zero_OI = _grid(start, order_I)
    for first in range(0, left_OI.shape[1], _BLOCK):
        here, after = slice(first, first + _BLOCK), slice(first + _BLOCK, None)
        codes_OI[:, here], errors_OB = _rounded(
            left_OI[:, here], scale_OI[:, here], zero_OI[:, here], factor_II[here, here], format
        )
        left_OI[:, after] -= errors_OB @ factor_II[here, after]
    values = torch.empty_like(codes_OI)
    values[:, order_I] = codes_OI
    values = values.to(torch.float8_e4m3fn if isinstance(format, Fp8) else torch.uint8)
    if isinstance(format, IntGroups) and format.bits == 4:
        values = pack_nibbles(values)
    return Stored(format, start.shape, {**start.parts, "values": values})


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
    if isinstance(stored.format, Fp8):
        scale_OI = stored.parts["scale"][:, None].expand(stored.shape)
        return scale_OI, torch.zeros_like(scale_OI)
    assert isinstance(stored.format, IntGroups)
    group_I = order_I // (stored.format.group or stored.shape[-1])
    scale_OI = stored.parts["scale"].float()[:, group_I]
    if stored.format.zeros:
        return scale_OI, stored.parts["zero"].float()[:, group_I]
    return scale_OI, torch.full_like(scale_OI, 1 << (stored.format.bits - 1))


def _rounded(
    left_OB: Tensor, scale_OB: Tensor, zero_OB: Tensor, factor_BB: Tensor, format: Fp8 | IntGroups
) -> tuple[Tensor, Tensor]:
    """Return (codes, errors in units of the factor's diagonal) of the columns of a block, both float32 [out, B]."""
    left_BO, scale_BO, zero_BO = (each.T.contiguous() for each in (left_OB, scale_OB, zero_OB))
    codes_BO, errors_BO = torch.empty_like(left_BO), torch.empty_like(left_BO)
    for column, (left_O, scale_O, zero_O) in enumerate(zip(left_BO, scale_BO, zero_BO, strict=True)):
        codes_BO[column] = _nearest(left_O / scale_O + zero_O, format)
        error_O = left_O - (codes_BO[column] - zero_O) * scale_O
        errors_BO[column] = error_O / factor_BB[column, column]
        left_BO[column + 1 :].addr_(factor_BB[column, column + 1 :], errors_BO[column], alpha=-1.0)
    return codes_BO.T, errors_BO.T


def _nearest(exact_O: Tensor, format: Fp8 | IntGroups) -> Tensor:
    """Return the codes that are nearest to numbers between them, in float32."""
    if isinstance(format, Fp8):
        most = torch.finfo(torch.float8_e4m3fn).max
        return exact_O.clamp_(-most, most).to(torch.float8_e4m3fn).float()
    return exact_O.round_().clamp_(0, (1 << format.bits) - 1)
