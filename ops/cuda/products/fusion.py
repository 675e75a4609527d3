"""What a product on CUDA does besides multiplying: what it needs before, and what it makes of its sums.

Plain values that the kernels of products take; knows none of them. Shape letters as in `ops/paged.py`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, Literal, NamedTuple, TypeAlias

from headrace.ops.paged import UNSCALED, KvScales

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["GATED", "SQUARED", "AddNorm", "After", "Before", "Fusion", "Gated", "HeadTargets", "Residual", "Squares"]

Fusion = Literal[
    "plain", "logits", "gated", "residual", "norm plain", "norm gated", "factors plain", "factors gated", "heads"
]
"""What one launch computes: a product alone, in float32 for logits, with silu(gate) * up, or added to the residual
stream; "norm" is after the norm of the stream, and "factors" after a norm whose factors the input lacks; "heads" makes
rotated queries and stores keys and values."""


SQUARED: Final = 64
"""Features whose squares are summed together in `Squares`."""


class AddNorm(NamedTuple):
    """Step before the product: `sum = x + residual`, kept in `residual_out`, and the sum's RMS norm times `weight`."""

    weight: Tensor
    eps: float
    residual: Tensor | None = None
    """Residual to add; None for the norm of x alone, which keeps no sum."""
    residual_out: Tensor | None = None
    """Output of the sum; must not be `residual`, which every program of the kernel reads."""


class Squares(NamedTuple):
    """Squares of a sum, from which a norm's factors are made for inputs that are the sum times the norm's weight."""

    parts_EN: Tensor
    """Squares of the sum, summed over `SQUARED` features each, float32 [E / SQUARED, N]."""

    pdl: bool = False
    """Whether what reads them is launched while the kernel that makes them still runs."""

    def normed(self, x_NE: Tensor, _total_NE: Tensor, _norm_E: Tensor, eps: float) -> Tensor:
        """Return x times the norm's factors, in place."""
        from headrace.ops.cuda.products.factors import finish_norm  # imports the compiler

        finish_norm(x_NE, self.parts_EN, eps, pdl=self.pdl)
        return x_NE


class Gated(NamedTuple):
    """silu(gate) * up of a product whose weight has F rows of gates, then F of ups."""


GATED: Final = Gated()


class Residual(NamedTuple):
    """Addition to the residual stream, whose sum times the next norm's weight is the output."""

    total_NE: Tensor
    """Sum of the stream, contiguous, to which the product is added."""
    norm_E: Tensor
    """Weight of the next norm."""
    squares: Squares
    """Output of the squares of the sum."""


class HeadTargets(NamedTuple):
    """Norms and rotation of heads, and the places that they go to."""

    q_norm_D: Tensor | None
    """RMS norm weight of query heads, given together with `k_norm_D`."""
    k_norm_D: Tensor | None
    cos_sin_PD: Tensor
    """Rotary table, float32: D/2 cosines, then D/2 sines."""
    positions_N: Tensor
    """Position of each token, int32 or int64."""
    slots_N: Tensor
    """Place of each key and value, int64: page * page_size + offset; -1 stores nothing."""
    kv_layer: Tensor
    """Paged cache of the layer, `[pages, 2, T, K, D]`, of the product's dtype or float8_e4m3fn."""
    scales: KvScales = UNSCALED


Before: TypeAlias = AddNorm | Squares | None
After: TypeAlias = Gated | Residual | HeadTargets | None
