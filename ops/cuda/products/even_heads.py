"""Computes queries, keys and values of a batch, rotated and stored, in one launch (csrc/even_heads.cu).

For 2 to 64 rows. Needs Hopper for its copies and clusters. Shape letters as in `ops/paged.py`, I input features.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from headrace.ops.cuda.compiling.source import MOST_ROWS, build_for_rows, compiled_for, lacks_wgmma
from headrace.ops.paged import UNSCALED, KvScales

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from headrace.ops.cuda.adapters.rows import WornSite
    from headrace.ops.cuda.arch import Arch
    from headrace.ops.cuda.products.even_linear import Squares

__all__ = ["EvenHeads", "HeadTargets"]

_LINE = 64
_HEAD = 128


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


class EvenHeads:
    """Products that become queries, keys and values, on one stream."""

    def __init__(self, *, eps: float, pdl: bool = False) -> None:
        """Compute with `eps` of the norms; `pdl` is whether to use programmatic dependent launch.

        With `pdl`, no kernel before a product may write the product's weight.
        """
        self._eps, self._pdl = eps, pdl

    @staticmethod
    def build(*, worn: bool = False) -> None:
        """Compile the kernels, or those with updates; takes half a minute and a compiler the first time.

        Raises:
            CannotCompile: The kernels are not kept and cannot be compiled.
            OSError: A compiler cannot be run, or the folder of kernels cannot be written.
        """
        build_for_rows("even_heads", worn=worn)

    @staticmethod
    def refuses(dtype: torch.dtype, head_dim: int, arch: Arch) -> str | None:
        """Return why the kernels cannot run for such heads on a GPU; None if they can."""
        if head_dim != _HEAD:
            return f"heads are of {head_dim}, the kernel takes {_HEAD}"
        return lacks_wgmma(dtype, arch)

    @staticmethod
    def fits(rows: int, size_in: int) -> bool:
        """Return whether these kernels should compute a product of such sizes."""
        return 1 < rows <= MOST_ROWS and size_in % _LINE == 0

    def run(
        self, x_NI: Tensor, weight_OI: Tensor, squares: Squares | None, to: HeadTargets, worn: WornSite | None = None
    ) -> Tensor:
        """Return the queries of `x W^T`, normed and rotated, [N, H * D]; keys and values are stored.

        Args:
            x_NI: Input, bf16, last dimension contiguous.
            weight_OI: Weight in the same dtype, contiguous: H query heads, K key heads, K value heads.
            squares: The squares of the norm whose factors `x_NI` lacks.
            to: Norms, rotation and places of the heads.
            worn: Updates of queries, keys and values to add to the product.
        """
        normed, heads = to.q_norm_D is not None, len(weight_OI) // _HEAD
        q_NX = x_NI.new_empty(len(x_NI), (heads - 2 * to.kv_layer.shape[3]) * _HEAD)
        compiled_for(len(x_NI), "even_heads", worn=worn is not None).run(
            x_NI, weight_OI, q_NX if squares is None else squares.parts_EN, squares is not None, q_NX, to.kv_layer,
            to.q_norm_D if normed else q_NX, to.k_norm_D if normed else q_NX, normed,
            to.cos_sin_PD, to.positions_N, to.slots_N, to.scales.k, to.scales.v,
            self._eps, self._pdl, *(worn or (x_NI, x_NI, x_NI)),
        )  # fmt: skip
        return q_NX
