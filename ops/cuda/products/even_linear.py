"""Computes products of 2 to 64 rows with residual, norm and activation inside (csrc/even_linear.cu).

Such a product takes as long as reading its weight. Every multiprocessor reads for the same time, beginning while the
kernel before still runs. Needs Hopper for its copies and clusters. I input features, O output features, N rows.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch

from headrace.ops.cuda.compiling.source import MOST_ROWS, build_for_rows, compiled_for

if TYPE_CHECKING:
    from torch import Tensor

    from headrace.ops.cuda.adapters.rows import WornSite
    from headrace.ops.cuda.products.linear import LinearScratch

__all__ = ["EvenLinear", "Squares"]

_LINE = 64
_PLAIN, _GATED, _ADD = range(3)
_WIDE_TILES, _WIDE_ROWS = 2 * 132, 32
"""Limits measured on an H200: tiles twice as wide pay for more rows, where every multiprocessor gets one."""
_MOST_WEIGHTS = 128 << 20
"""Most elements of a weight, measured on an H200: the kernels of linear.py read that of an output head as fast."""


class Squares(NamedTuple):
    """Squares of a sum, from which a norm's factors are made for inputs that are the sum times the norm's weight."""

    parts_EN: Tensor
    """Squares of the sum, summed over 64 features each, float32 [E / 64, N]."""

    def normed(self, x_NE: Tensor, _total_NE: Tensor, _norm_E: Tensor, eps: float) -> Tensor:
        """Return x times the norm's factors."""
        squares_N1 = self.parts_EN.sum(0)[:, None]
        return (x_NE * torch.rsqrt(squares_N1 / x_NE.shape[1] + eps)).to(x_NE.dtype)


class EvenLinear:
    """Products of few rows on one stream, whose scratch they share."""

    def __init__(self, scratch: LinearScratch, *, eps: float, pdl: bool = False) -> None:
        """Compute with `eps` of the norms; `pdl` is whether to use programmatic dependent launch.

        With `pdl`, no kernel before a product may write the product's weight.
        """
        self._scratch, self._eps, self._pdl = scratch, eps, pdl

    @staticmethod
    def build(*, worn: bool = False) -> None:
        """Compile the kernels, or those with updates; takes half a minute and a compiler the first time.

        Raises:
            CannotCompile: The kernels are not kept and cannot be compiled.
            OSError: A compiler cannot be run, or the folder of kernels cannot be written.
        """
        build_for_rows("even_linear", worn=worn)

    @staticmethod
    def fits(rows: int, size_out: int, size_in: int) -> bool:
        """Return whether these kernels should compute a product of such sizes; gates and ups both count as outputs."""
        if not 1 < rows <= MOST_ROWS or size_out % _LINE or size_in % _LINE:
            return False
        return size_out * size_in <= _MOST_WEIGHTS

    def product(
        self,
        x_NI: Tensor,
        weight_OI: Tensor,
        out_NO: Tensor,
        squares: Squares | None = None,
        worn: WornSite | None = None,
    ) -> None:
        """Compute `out = x W^T`, accumulated in float32.

        Args:
            x_NI: Input, bf16, last dimension contiguous.
            weight_OI: Weight in the same dtype, contiguous.
            out_NO: Output in the same dtype, last dimension contiguous; must not overlap `x_NI`.
            squares: The squares of the norm whose factors `x_NI` lacks.
            worn: Update to add to the product: of one module, or in `silu_mul` of gate and up.
        """
        self._run(_PLAIN, x_NI, weight_OI, out_NO, squares, worn=worn)

    def silu_mul(
        self,
        x_NI: Tensor,
        weight_2FI: Tensor,
        out_NF: Tensor,
        squares: Squares | None = None,
        worn: WornSite | None = None,
    ) -> None:
        """Compute `out = silu(x G^T) * (x U^T)` with `product`'s arguments; the weight has F rows of G, then F of U."""
        self._run(_GATED, x_NI, weight_2FI, out_NF, squares, worn=worn)

    def add(
        self,
        x_NI: Tensor,
        weight_EI: Tensor,
        residual_NE: Tensor,
        norm_E: Tensor,
        out_NE: Tensor,
        worn: WornSite | None = None,
    ) -> Squares:
        """Compute `residual += x W^T`, then `out = residual * norm` without the norm's factors; return the squares.

        Sums, squares and `out` are computed in float32 and rounded once.
        """
        parts_EN = torch.empty(len(norm_E) // _LINE, len(x_NI), dtype=torch.float32, device=x_NI.device)
        self._run(_ADD, x_NI, weight_EI, out_NE, None, residual_NE, norm_E, parts_EN, worn)
        return Squares(parts_EN)

    def _run(
        self,
        kind: int,
        x_NI: Tensor,
        weight: Tensor,
        out: Tensor,
        squares: Squares | None,
        residual: Tensor | None = None,
        norm_E: Tensor | None = None,
        parts_EN: Tensor | None = None,
        worn: WornSite | None = None,
    ) -> None:
        tiles = len(weight) // _LINE
        splits = 4 if tiles <= 32 else 2 if tiles <= 64 and x_NI.shape[1] >= 2048 else 1
        wide = kind == _GATED and tiles >= _WIDE_TILES and len(x_NI) > _WIDE_ROWS
        compiled_for(len(x_NI), "even_linear", worn=worn is not None).run(
            x_NI, weight, out,
            out if residual is None else residual, out if norm_E is None else norm_E,
            out if parts_EN is None else parts_EN, out if squares is None else squares.parts_EN,
            self._scratch.planes, self._scratch.counters,
            kind, squares is not None, self._eps, splits, wide, self._pdl, *(worn or (x_NI, x_NI, x_NI)),
        )  # fmt: skip
