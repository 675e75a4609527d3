"""Activations of experts' gates and ups, as functions of Triton's kernels, and what csrc/ calls them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import triton
import triton.language as tl

from headrace.ops.experts import CLAMP, SLOPE

if TYPE_CHECKING:
    from headrace.ops.routing import ExpertActivation

__all__ = ["activated", "halves", "number_of"]

_NUMBERS: Final[dict[ExpertActivation | None, int]] = {None: -1, "silu": 0, "gelu_tanh": 1, "clamped_swiglu": 2}

_CLAMP: Final = tl.constexpr(CLAMP)
_SLOPE: Final = tl.constexpr(SLOPE)


def number_of(activation: ExpertActivation | None) -> int:
    """Return the number of an activation in csrc/experts.cuh, or that of downs, which have none."""
    return _NUMBERS[activation]


@triton.jit
def activated(gate, up, ACTIVATION: tl.constexpr):
    """Return the activation of gates times their ups, in float32."""
    inner = gate
    if ACTIVATION == "gelu_tanh":  # (1 + tanh(z)) / 2 is sigmoid(2 z), with z = sqrt(2 / pi) (x + 0.044715 x^3)
        inner = 1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)
    elif ACTIVATION == "clamped_swiglu":
        gate = tl.minimum(gate, _CLAMP)
        inner = gate * _SLOPE
        up = tl.minimum(tl.maximum(up, -_CLAMP), _CLAMP) + 1.0
    return gate * tl.sigmoid(inner) * up


@triton.jit
def halves(total, OUT: tl.constexpr, COLUMNS: tl.constexpr):
    """Return the gates and the ups, [OUT, COLUMNS] each, of sums whose lines are each a gate, then its up."""
    return total.reshape(OUT, 2, COLUMNS).permute(0, 2, 1).split()
