"""The kernels of products as `ProductRun`: each joins a declaration of kernels.py to the module that launches it."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from headrace.ops.cuda.products.even_heads import EvenHeads
from headrace.ops.cuda.products.even_linear import EvenLinear
from headrace.ops.cuda.products.fusion import AddNorm, HeadTargets, Residual, Squares
from headrace.ops.cuda.products.linear import linear, linear_silu_mul
from headrace.ops.cuda.products.tile_linear import TileLinear
from headrace.ops.cuda.products.vector import vector_linear

if TYPE_CHECKING:
    from torch import Tensor

    from headrace.ops.cuda.adapters.rows import WornSite
    from headrace.ops.cuda.products.fusion import After, Before, Fusion
    from headrace.ops.cuda.products.registry import ProductKernel, ProductRoom

__all__ = ["CublasRun", "EvenHeadsRun", "EvenRun", "FewRowsGatedRun", "FewRowsRun", "TileRun", "VectorRun"]


class _Run:
    """What every kernel needs at a launch."""

    def __init__(self, room: ProductRoom, kernel: ProductKernel, fusion: Fusion = "plain") -> None:
        """Launch on the stream of `room`."""
        self._pdl, self._scratch, self._note = room.pdl, room.scratch, room.chain.note
        self._launch, self._worn_launch = (
            replace(launch, overlaps=launch.overlaps and room.pdl)
            for launch in (kernel.launch(fusion), kernel.launch(fusion, worn=True))
        )


class VectorRun(_Run):
    """Product of one row, with the norm before and the activation after."""

    def run(
        self,
        x_NI: Tensor,
        weight_OI: Tensor,
        out: Tensor,
        before: Before = None,
        after: After = None,
        worn: WornSite | None = None,
    ) -> None:
        """Enqueue the Triton kernel."""
        assert not isinstance(before, Squares)
        self._note(self._launch)
        vector_linear(x_NI, weight_OI, out, norm=before, gated=after is not None, pdl=self._pdl)


class FewRowsRun(_Run):
    """Product of few rows."""

    def run(
        self,
        x_NI: Tensor,
        weight_OI: Tensor,
        out: Tensor,
        before: Before = None,
        after: After = None,
        worn: WornSite | None = None,
    ) -> None:
        """Enqueue the Triton kernel."""
        self._note(self._launch)
        linear(x_NI, weight_OI, out, self._scratch, pdl=self._pdl)


class FewRowsGatedRun(_Run):
    """Product of gates and ups of few rows, with the activation inside."""

    def run(
        self,
        x_NI: Tensor,
        weight_OI: Tensor,
        out: Tensor,
        before: Before = None,
        after: After = None,
        worn: WornSite | None = None,
    ) -> None:
        """Enqueue the Triton kernel."""
        self._note(self._launch)
        linear_silu_mul(x_NI, weight_OI, out, pdl=self._pdl, tuning=self._scratch.arch.tuning)


class EvenRun(_Run):
    """Product of few rows in which all multiprocessors read for the same time."""

    def __init__(self, room: ProductRoom, kernel: ProductKernel) -> None:
        """Launch on the stream of `room`."""
        super().__init__(room, kernel)
        self._even = EvenLinear(room.scratch, eps=room.eps, pdl=room.pdl)

    def run(
        self,
        x_NI: Tensor,
        weight_OI: Tensor,
        out: Tensor,
        before: Before = None,
        after: After = None,
        worn: WornSite | None = None,
    ) -> None:
        """Enqueue the kernel of csrc/."""
        assert not isinstance(before, AddNorm) and not isinstance(after, HeadTargets)
        self._note(self._launch if worn is None else self._worn_launch)
        if after is None:
            self._even.product(x_NI, weight_OI, out, before, worn)
        elif isinstance(after, Residual):
            self._even.add(x_NI, weight_OI, after.total_NE, after.norm_E, out, worn, after.squares)
        else:
            self._even.silu_mul(x_NI, weight_OI, out, before, worn)


class EvenHeadsRun(_Run):
    """Product that becomes rotated queries and stored keys and values."""

    def __init__(self, room: ProductRoom, kernel: ProductKernel) -> None:
        """Launch on the stream of `room`."""
        super().__init__(room, kernel, "heads")
        self._heads = EvenHeads(eps=room.eps, pdl=room.pdl)

    def run(
        self,
        x_NI: Tensor,
        weight_OI: Tensor,
        out: Tensor,
        before: Before = None,
        after: After = None,
        worn: WornSite | None = None,
    ) -> None:
        """Enqueue the kernel of csrc/."""
        assert not isinstance(before, AddNorm) and isinstance(after, HeadTargets)
        self._note(self._launch if worn is None else self._worn_launch)
        self._heads.run(x_NI, weight_OI, before, after, worn, out)


class TileRun(_Run):
    """Product of gates and ups of many rows, with the activation inside."""

    def run(
        self,
        x_NI: Tensor,
        weight_OI: Tensor,
        out: Tensor,
        before: Before = None,
        after: After = None,
        worn: WornSite | None = None,
    ) -> None:
        """Enqueue the kernel of csrc/."""
        self._note(self._launch)
        TileLinear.silu_mul(x_NI, weight_OI, out, pdl=self._pdl)


class CublasRun(_Run):
    """Product of any number of rows."""

    def run(
        self,
        x_NI: Tensor,
        weight_OI: Tensor,
        out: Tensor,
        before: Before = None,
        after: After = None,
        worn: WornSite | None = None,
    ) -> None:
        """Enqueue torch's product."""
        self._note(self._launch)
        if out.dtype is x_NI.dtype:
            torch.mm(x_NI, weight_OI.t(), out=out)
        else:
            torch.mm(x_NI, weight_OI.t(), out_dtype=out.dtype, out=out)
