"""`fitted`: chooses the scales and zero points of groups of 4-bit integers; never packs codes.

The range of the codes is narrowed in steps from the group's extremes inwards, and the one with the smallest sum of
weighted squared errors is taken. Where nothing is known of the inputs, errors of large weights count more. Real models
have single weights of many times the size of the others, on which all they compute depends, so that no range may cut
them down for the sake of the rest of their group.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import torch

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["fitted", "nearest"]

_SHARES: Final = (1.0, 0.95, 0.9, 0.85, 0.8, 0.75, 0.7, 0.65)
_SMALLEST: Final = 6.2e-5
"""Smallest scale, which float16 holds as a normal number."""
_TOP: Final = 15


def fitted(values_OGg: Tensor, has_zeros: bool, importance_Gg: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Return (scales, zero points) of the smallest weighted squared error that is found, both float32 [O, G, 1].

    Scales have the eight significant bits of bfloat16. Zero points are codes; all are 8 for groups without their own.

    Args:
        values_OGg: Groups of weights, float32 [out, groups, inputs of a group].
        has_zeros: Whether groups have zero points of their own.
        importance_Gg: Weight of each input's squared errors, float32; None to weight each element's by its magnitude
            plus the root mean square of its group.
    """
    if importance_Gg is None:
        size_OGg = values_OGg.abs()
        importance_Gg = size_OGg.add_(values_OGg.square().mean(-1, keepdim=True).sqrt_())
    low, high = values_OGg.amin(-1, keepdim=True).clamp_(max=0), values_OGg.amax(-1, keepdim=True).clamp_(min=0)
    widest = (high - low) / _TOP if has_zeros else torch.maximum(high / 7, low / -8)
    best = least = None
    for share in _SHARES:
        scale = (widest * share).clamp_(min=_SMALLEST).bfloat16().float()
        between = low * -share / scale
        for zero in (between.floor(), between.ceil()) if has_zeros else (torch.full_like(scale, 8.0),):
            zero.clamp_(0, _TOP)
            codes = nearest(values_OGg, scale, zero)
            error = (codes.sub_(zero).mul_(scale).sub_(values_OGg).square_() * importance_Gg).sum(-1, keepdim=True)
            if best is None or least is None:
                best, least = (scale, zero), error
                continue
            is_better = error < least
            best = torch.where(is_better, scale, best[0]), torch.where(is_better, zero, best[1])
            least = torch.minimum(error, least)
    assert best is not None
    return best


def nearest(values_OGg: Tensor, scale: Tensor, zero: Tensor) -> Tensor:
    """Return the codes that are nearest to groups of weights, float32 [O, G, g]."""
    return (values_OGg / scale).add_(zero).round_().clamp_(0, _TOP)
