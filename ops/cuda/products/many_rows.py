"""Computes products of many rows with the activation inside (csrc/tile_linear.cu), and with codes (csrc/many_rows.cu).

Such a product is limited by arithmetic or by power, and the activation by memory: inside the product, the activation
costs next to nothing. Codes become bfloat16 once for up to 256 rows, while tensor cores multiply by those before. Both
kernels need Hopper for their copies, clusters and products. I input features, O output features, F gates, N rows.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from headrace.ops.cuda.compiling.source import compiled

if TYPE_CHECKING:
    from torch import Tensor

    from headrace.ops.cuda.codes.layout import Codes
    from headrace.ops.cuda.products.linear import LinearScratch

__all__ = ["TileLinear", "many_rows_linear", "rows_of_tiles"]

_TILES = ((256, 20), (192, 16), (128, 14))
"""Rows of a tile, and how long it takes beside others, measured on an H200; of equally long ways the first is taken."""


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


def many_rows_linear(
    x_NI: Tensor, weight: Codes, out: Tensor, scratch: LinearScratch, *, gated: bool = False, pdl: bool = False
) -> None:
    """Compute `out = x W^T` [N, O], or `out = silu(x G^T) * (x U^T)` [N, F], in float32 until it is rounded once.

    Weights whose groups have scales are rounded to bfloat16 when these are applied.

    Args:
        x_NI: Input, bf16, last dimension contiguous, I a multiple of 64.
        weight: Weight in codes; with `gated`, F outputs of G, then F of U.
        out: Output in the dtype of `x_NI`, last dimension contiguous, O a multiple of 8, or F of 64; must not overlap
            `x_NI`.
        scratch: Room for the sums of tiles that blocks share.
        gated: Whether the weight has gates and ups.
        pdl: Whether to use programmatic dependent launch, in which weights are read before the wait.
    """
    compiled("many_rows", **weight.kind.macros).run(
        x_NI, weight.codes_OB, weight.scales, weight.zeros, out, scratch.planes, scratch.counters,
        gated, rows_of_tiles(len(x_NI)), pdl,
    )  # fmt: skip


def rows_of_tiles(rows: int) -> int:
    """Return the rows of the tiles into which `rows` rows are divided: 128, 192 or 256."""
    return min(_TILES, key=lambda tile: -(-rows // tile[0]) * tile[1])[0]
