"""Queries, keys and values of a batch, made, rotated and stored in one launch (csrc/even_heads.cu); never chooses it.

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
    """What heads become, and where they go."""

    q_norm_D: Tensor | None
    """Given together with `k_norm_D`."""
    k_norm_D: Tensor | None
    cos_sin_PD: Tensor
    """float32: D/2 cosines, then D/2 sines."""
    positions_N: Tensor
    """int32 or int64."""
    slots_N: Tensor
    """int64 page * page_size + offset; -1 stores nothing."""
    kv_layer: Tensor
    """`[pages, 2, T, K, D]`, of the product's dtype or float8_e4m3fn."""
    scales: KvScales = UNSCALED


class EvenHeads:
    """The products of one stream."""

    def __init__(self, *, eps: float, pdl: bool = False) -> None:
        """Compute with `eps` of the norms; with `pdl` launch programmatically dependent.

        No kernel before a product may then write its weight.
        """
        self._eps, self._pdl = eps, pdl

    @staticmethod
    def build(*, worn: bool = False) -> None:
        """Compile the kernels, or those with updates; takes half a minute and a compiler the first time.

        Raises:
            RuntimeError: They cannot be compiled.
            OSError: There is nothing to compile them with.
        """
        build_for_rows("even_heads", worn=worn)

    @staticmethod
    def refuses(dtype: torch.dtype, head_dim: int, arch: Arch) -> str | None:
        """Say why the kernels cannot run for such heads on a GPU; None where they can."""
        if head_dim != _HEAD:
            return f"heads are of {head_dim}, the kernel takes {_HEAD}"
        return lacks_wgmma(dtype, arch)

    @staticmethod
    def fits(rows: int, size_in: int) -> bool:
        """Whether this is the way to compute a product of such sizes."""
        return 1 < rows <= MOST_ROWS and size_in % _LINE == 0

    def run(
        self, x_NI: Tensor, weight_OI: Tensor, squares: Squares | None, to: HeadTargets, worn: WornSite | None = None
    ) -> Tensor:
        """The queries of `x W^T`, normed and rotated: [N, H * D]; keys and values are stored.

        Args:
            x_NI: bf16, last dimension contiguous.
            weight_OI: Same dtype, contiguous: H query heads, K key heads, K value heads.
            squares: Of the norm whose factors are still missing from `x_NI`.
            to: Where they go.
            worn: Added to the product: the updates of queries, keys and values.
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
