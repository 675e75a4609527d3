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

_FEWEST_ROWS = 2048
"""Fewest rows for this kernel, measured on an H200: with fewer, cuBLAS divides the work better."""
_PIECE = 8


class TileLinear:
    """Products of gates and ups for many rows."""

    @staticmethod
    def build() -> None:
        """Compile the kernel; takes seconds and a compiler the first time.

        Raises:
            CannotCompile: The kernel is not kept and cannot be compiled.
            OSError: A compiler cannot be run, or the folder of kernels cannot be written.
        """
        compiled("tile_linear")

    @staticmethod
    def fits(rows: int, size_out: int, size_in: int) -> bool:
        """Return whether this kernel should compute a product of such sizes; gates and ups both count as outputs."""
        return rows >= _FEWEST_ROWS and size_out % (2 * _PIECE) == 0 and size_in % _PIECE == 0

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
