"""Computes silu(gate) * up of many rows in one kernel with its product (csrc/tile_linear.cu).

Such a product is limited by arithmetic or by power, and the activation by memory: inside the product, the activation
costs next to nothing. Needs Hopper for its copies, clusters and products. I input features, F outputs, N rows.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from headrace.ops.cuda.compiling.source import compiled

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["TileLinear"]


class TileLinear:
    """Products of gates and ups for many rows."""

    @staticmethod
    def silu_mul(x_NI: Tensor, weight_2FI: Tensor, out_NF: Tensor, *, pdl: bool = False) -> None:
        """Compute `out = silu(x G^T) * (x U^T)`, in float32 until it is rounded once.

        Args:
            x_NI: Input, bf16, last dimension contiguous, I a multiple of 8.
            weight_2FI: Weight in the same dtype, contiguous: F rows of G, then F of U; F a multiple of 8.
            out_NF: Output in the same dtype, last dimension contiguous; must not overlap `x_NI`.
            pdl: Whether to use programmatic dependent launch.
        """
        compiled("tile_linear").run(x_NI, weight_2FI, out_NF, pdl)
