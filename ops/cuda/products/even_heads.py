"""Computes queries, keys and values of a batch, rotated and stored, in one launch (csrc/even_heads.cu).

For 2 to 64 rows. Needs Hopper for its copies and clusters. Shape letters as in `ops/paged.py`, I input features.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from headrace.ops.cuda.codes.layout import Codes
from headrace.ops.cuda.compiling.source import compiled_for

if TYPE_CHECKING:
    from torch import Tensor

    from headrace.ops.cuda.adapters.rows import UpdateSite
    from headrace.ops.cuda.products.fusion import HeadTargets, Squares

__all__ = ["EvenHeads"]

_HEAD = 128


class EvenHeads:
    """Products that become queries, keys and values, on one stream."""

    def __init__(self, *, eps: float, pdl: bool = False) -> None:
        """Compute with `eps` of the norms; `pdl` is whether to use programmatic dependent launch.

        kernels.py declares what a product then reads before it waits.
        """
        self._eps, self._pdl = eps, pdl

    def run(
        self,
        x_NI: Tensor,
        weight_OI: Tensor | Codes,
        squares: Squares | None,
        to: HeadTargets,
        updates: UpdateSite | None = None,
        q_NX: Tensor | None = None,
    ) -> Tensor:
        """Return the queries of `x W^T`, normed and rotated, [N, H * D]; keys and values are stored.

        Args:
            x_NI: Input, bf16, last dimension contiguous.
            weight_OI: Weight in the same dtype, contiguous, or in codes: H query heads, K key heads, K value heads.
            squares: The squares of the norm whose factors `x_NI` lacks.
            to: Norms, rotation and places of the heads.
            updates: Updates of queries, keys and values to add to the product.
            q_NX: Output of the queries, contiguous; None to allocate it.
        """
        normed, heads = to.q_norm_D is not None, weight_OI.shape[0] // _HEAD
        held, sizes = (weight_OI, weight_OI, weight_OI), dict[str, int]()
        if isinstance(weight_OI, Codes):
            held, sizes = (weight_OI.codes_OB, weight_OI.scales, weight_OI.zeros), weight_OI.kind.macros
        if q_NX is None:
            q_NX = x_NI.new_empty(len(x_NI), (heads - 2 * to.kv_layer.shape[3]) * _HEAD)
        compiled_for(len(x_NI), "even_heads", updates=updates is not None, **sizes).run(
            x_NI, *held, q_NX if squares is None else squares.parts_EN, squares is not None, q_NX, to.kv_layer,
            to.q_norm_D if normed else q_NX, to.k_norm_D if normed else q_NX, normed,
            to.cos_sin_PD, to.positions_N, to.slots_N, to.scales.k, to.scales.v,
            self._eps, self._pdl, *(updates or (x_NI, x_NI, x_NI)),
        )  # fmt: skip
        return q_NX
