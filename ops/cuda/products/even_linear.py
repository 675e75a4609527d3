"""Computes products of 2 to 64 rows with residual, norm and activation inside (csrc/even_linear.cu).

Such a product takes as long as reading its weight. Every multiprocessor reads for the same time, beginning while the
kernel before still runs. Needs Hopper for its copies and clusters. I input features, O output features, N rows.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from headrace.ops.cuda.codes.layout import Codes
from headrace.ops.cuda.compiling.source import compiled_for
from headrace.ops.cuda.products.fusion import Squares

if TYPE_CHECKING:
    from torch import Tensor

    from headrace.ops.cuda.adapters.rows import UpdateSite
    from headrace.ops.cuda.products.linear import LinearScratch

__all__ = ["EvenLinear"]

_LINE = 64
_PLAIN, _GATED, _ADD = range(3)


class EvenLinear:
    """Products of few rows on one stream, whose scratch they share."""

    def __init__(self, scratch: LinearScratch, *, eps: float, pdl: bool = False) -> None:
        """Compute with `eps` of the norms; `pdl` is whether to use programmatic dependent launch.

        kernels.py declares what a product then reads before it waits.
        """
        self._scratch, self._eps, self._pdl = scratch, eps, pdl

    def product(
        self,
        x_NI: Tensor,
        weight_OI: Tensor | Codes,
        out_NO: Tensor,
        squares: Squares | None = None,
        updates: UpdateSite | None = None,
    ) -> None:
        """Compute `out = x W^T`, accumulated in float32.

        Args:
            x_NI: Input, bf16, last dimension contiguous.
            weight_OI: Weight in the same dtype, contiguous, or in codes.
            out_NO: Output in the same dtype, last dimension contiguous; must not overlap `x_NI`.
            squares: The squares of the norm whose factors `x_NI` lacks.
            updates: Update to add to the product: of one module, or in `silu_mul` of gate and up.
        """
        self._run(_PLAIN, x_NI, weight_OI, out_NO, squares, updates=updates)

    def silu_mul(
        self,
        x_NI: Tensor,
        weight_2FI: Tensor | Codes,
        out_NF: Tensor,
        squares: Squares | None = None,
        updates: UpdateSite | None = None,
    ) -> None:
        """Compute `out = silu(x G^T) * (x U^T)` with `product`'s arguments; the weight has F rows of G, then F of U."""
        self._run(_GATED, x_NI, weight_2FI, out_NF, squares, updates=updates)

    def add(
        self,
        x_NI: Tensor,
        weight_EI: Tensor | Codes,
        residual_NE: Tensor,
        norm_E: Tensor,
        out_NE: Tensor,
        updates: UpdateSite | None = None,
        squares: Squares | None = None,
    ) -> Squares:
        """Compute `residual += x W^T`, then `out = residual * norm` without the norm's factors; return the squares.

        Sums, squares and `out` are computed in float32 and rounded once. The squares go to `squares`, if given.
        """
        if squares is None:
            shape = len(norm_E) // _LINE, len(x_NI)
            squares = Squares(torch.empty(shape, dtype=torch.float32, device=x_NI.device))
        self._run(_ADD, x_NI, weight_EI, out_NE, None, residual_NE, norm_E, squares.parts_EN, updates)
        return squares

    def _run(
        self,
        kind: int,
        x_NI: Tensor,
        weight: Tensor | Codes,
        out: Tensor,
        squares: Squares | None,
        residual: Tensor | None = None,
        norm_E: Tensor | None = None,
        parts_EN: Tensor | None = None,
        updates: UpdateSite | None = None,
    ) -> None:
        (size_out, size_in), rows, tuning = weight.shape, len(x_NI), self._scratch.arch.tuning
        if isinstance(weight, Codes):
            held, sizes = (weight.codes_OB, weight.scales, weight.zeros), weight.kind.macros
            splits, wide = tuning.coded_splits_of(size_out, size_in, rows, gated=kind == _GATED)
        else:
            held, sizes = (weight, weight, weight), {}
            splits = tuning.splits_of(size_out // _LINE * _LINE, size_in)
            wide = kind == _GATED and size_out // _LINE >= tuning.even_wide_tiles and rows > tuning.even_wide_rows
        compiled_for(rows, "even_linear", updates=updates is not None, **sizes).run(
            x_NI, *held, out,
            out if residual is None else residual, out if norm_E is None else norm_E,
            out if parts_EN is None else parts_EN, out if squares is None else squares.parts_EN,
            self._scratch.planes, self._scratch.counters,
            kind, squares is not None, self._eps, splits, wide, self._pdl, *(updates or (x_NI, x_NI, x_NI)),
        )  # fmt: skip
