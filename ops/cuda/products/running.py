"""The kernels of products as `ProductRun`: each joins a declaration of kernels.py to the module that launches it."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

import torch

from headrace.ops.cuda.hazards import Launch
from headrace.ops.cuda.products.coded_tiles import coded_tiles_linear
from headrace.ops.cuda.products.coded_vector import coded_vector_linear
from headrace.ops.cuda.products.even_heads import EvenHeads
from headrace.ops.cuda.products.even_linear import EvenLinear
from headrace.ops.cuda.products.fusion import AddNorm, HeadTargets, Residual, Squares
from headrace.ops.cuda.products.gathered import gather
from headrace.ops.cuda.products.linear import MAX_ROWS, linear, linear_silu_mul
from headrace.ops.cuda.products.many_rows import TileLinear, many_rows_linear
from headrace.ops.cuda.products.scaled.inputs import to_codes, to_codes_of_groups
from headrace.ops.cuda.products.scaled.tiles import scaled_tiles_linear, scaled_tiling
from headrace.ops.cuda.products.unpacked import SLICE, unpack
from headrace.ops.cuda.products.vector import vector_linear

if TYPE_CHECKING:
    from torch import Tensor

    from headrace.ops.cuda.adapters.rows import UpdateSite
    from headrace.ops.cuda.codes.layout import Codes
    from headrace.ops.cuda.products.fusion import After, Before, Fusion
    from headrace.ops.cuda.products.registry import ProductKernel, ProductRoom, ProductRun

__all__ = [
    "CodedTilesRun",
    "CodedVectorRun",
    "CublasRun",
    "EvenHeadsRun",
    "EvenRun",
    "FewRowsGatedRun",
    "FewRowsRun",
    "ManyRowsRun",
    "OrderedRun",
    "PassesRun",
    "Product",
    "ScaledBlocksRun",
    "ScaledRun",
    "ScaledTilesRun",
    "TileRun",
    "UnpackedRun",
    "VectorRun",
]


class Product(NamedTuple):
    """One product, as `ProductRun.run` was asked for it."""

    x_NI: Tensor
    weight: Tensor | Codes
    out: Tensor
    before: Before
    after: After
    updates: UpdateSite | None

    @property
    def weight_OI(self) -> Tensor:
        """The weight of a kernel for dense ones."""
        assert isinstance(self.weight, torch.Tensor)
        return self.weight

    @property
    def codes(self) -> Codes:
        """The weight of a kernel for codes alone."""
        assert not isinstance(self.weight, torch.Tensor)
        return self.weight


class _Run:
    """What every kernel does at a launch."""

    _preparations: tuple[Launch, ...] = ()
    """Launches before that of the product."""

    def __init__(self, room: ProductRoom, kernel: ProductKernel, fusion: Fusion = "plain") -> None:
        """Launch on the stream of `room`."""
        self._pdl, self._scratch, self._note = room.pdl, room.scratch, room.chain.note
        self._launch, self._updates_launch = (
            replace(launch, overlaps=launch.overlaps and room.pdl)
            for launch in (kernel.launch(fusion), kernel.launch(fusion, updates=True))
        )

    def run(
        self,
        x_NI: Tensor,
        weight: Tensor | Codes,
        out: Tensor,
        before: Before = None,
        after: After = None,
        updates: UpdateSite | None = None,
    ) -> None:
        """Note the launches and enqueue the kernels."""
        for launch in (*self._preparations, self._launch if updates is None else self._updates_launch):
            self._note(launch)
        self._enqueue(Product(x_NI, weight, out, before, after, updates))

    def _enqueue(self, product: Product) -> None:
        raise NotImplementedError


class VectorRun(_Run):
    """Product of one row, with the norm before and the activation after."""

    def _enqueue(self, product: Product) -> None:
        before, is_gated = product.before, product.after is not None
        assert not isinstance(before, Squares)
        vector_linear(product.x_NI, product.weight_OI, product.out, norm=before, gated=is_gated, pdl=self._pdl)


class FewRowsRun(_Run):
    """Product of few rows."""

    def _enqueue(self, product: Product) -> None:
        linear(product.x_NI, product.weight_OI, product.out, self._scratch, pdl=self._pdl)


class FewRowsGatedRun(_Run):
    """Product of gates and ups of few rows, with the activation inside."""

    def _enqueue(self, product: Product) -> None:
        tuning = self._scratch.arch.tuning
        linear_silu_mul(product.x_NI, product.weight_OI, product.out, pdl=self._pdl, tuning=tuning)


class EvenRun(_Run):
    """Product of few rows in which all multiprocessors read for the same time."""

    def __init__(self, room: ProductRoom, kernel: ProductKernel) -> None:
        """Launch on the stream of `room`."""
        super().__init__(room, kernel)
        self._even = EvenLinear(room.scratch, eps=room.eps, pdl=room.pdl)

    def _enqueue(self, product: Product) -> None:
        x_NI, weight, out, before, after, updates = product
        assert not isinstance(before, AddNorm) and not isinstance(after, HeadTargets)
        if after is None:
            self._even.product(x_NI, weight, out, before, updates)
        elif isinstance(after, Residual):
            self._even.add(x_NI, weight, after.total_NE, after.norm_E, out, updates, after.squares)
        else:
            self._even.silu_mul(x_NI, weight, out, before, updates)


class EvenHeadsRun(_Run):
    """Product that becomes rotated queries and stored keys and values."""

    def __init__(self, room: ProductRoom, kernel: ProductKernel) -> None:
        """Launch on the stream of `room`."""
        super().__init__(room, kernel, "heads")
        self._heads = EvenHeads(eps=room.eps, pdl=room.pdl)

    def _enqueue(self, product: Product) -> None:
        x_NI, weight, out, before, after, updates = product
        assert not isinstance(before, AddNorm) and isinstance(after, HeadTargets)
        self._heads.run(x_NI, weight, before, after, updates, out)


class TileRun(_Run):
    """Product of gates and ups of many rows, with the activation inside."""

    def _enqueue(self, product: Product) -> None:
        TileLinear.silu_mul(product.x_NI, product.weight_OI, product.out, pdl=self._pdl)


class CublasRun(_Run):
    """Product of any number of rows."""

    def _enqueue(self, product: Product) -> None:
        _multiply(product.x_NI, product.weight_OI, product.out)


class CodedVectorRun(_Run):
    """Product of one row with codes, with the activation after."""

    def _enqueue(self, product: Product) -> None:
        is_gated = product.after is not None
        coded_vector_linear(product.x_NI, product.codes, product.out, gated=is_gated, pdl=self._pdl)


class CodedTilesRun(_Run):
    """Product of few rows with codes, with the activation after."""

    def _enqueue(self, product: Product) -> None:
        is_gated = product.after is not None
        coded_tiles_linear(product.x_NI, product.codes, product.out, self._scratch, gated=is_gated, pdl=self._pdl)


class OrderedRun:
    """Product with codes whose columns lie in an order of their own, by a run for others."""

    def __init__(self, room: ProductRoom, run: ProductRun) -> None:
        """Launch on the stream of `room`."""
        self._run, self._pdl, self._note = run, room.pdl, room.chain.note
        self._launch = Launch(
            "the gather of an input", room.pdl, early=frozenset(("weights",)), writes=frozenset(("activations",))
        )

    def run(
        self,
        x_NI: Tensor,
        weight: Tensor | Codes,
        out: Tensor,
        before: Before = None,
        after: After = None,
        updates: UpdateSite | None = None,
    ) -> None:
        """Note the launches and enqueue the kernels."""
        assert not isinstance(weight, torch.Tensor) and updates is None
        gathered_NI = torch.empty(x_NI.shape, dtype=x_NI.dtype, device=x_NI.device)
        self._note(self._launch)
        gather(x_NI, weight.order_I, gathered_NI, pdl=self._pdl)
        self._run.run(gathered_NI, weight._replace(kind=weight.kind.in_order), out, before, after)


class PassesRun(EvenRun):
    """Product of rows in passes of as many as the kernel for few rows takes."""

    def _enqueue(self, product: Product) -> None:
        for x_NI, out in zip(product.x_NI.split(MAX_ROWS), product.out.split(MAX_ROWS), strict=True):
            super()._enqueue(product._replace(x_NI=x_NI, out=out))


class ManyRowsRun(_Run):
    """Product of many rows with codes, with the activation after."""

    def _enqueue(self, product: Product) -> None:
        is_gated = product.after is not None
        many_rows_linear(product.x_NI, product.codes, product.out, self._scratch, gated=is_gated, pdl=self._pdl)


class UnpackedRun(_Run):
    """Product of any number of rows with dense slices of codes."""

    def __init__(self, room: ProductRoom, kernel: ProductKernel) -> None:
        """Launch on the stream of `room`, and allocate the slice before a graph is captured."""
        super().__init__(room, kernel)
        self._scratch.dense(SLICE, torch.bfloat16)

    def _enqueue(self, product: Product) -> None:
        x_NI, codes, out = product.x_NI, product.codes, product.out
        size_out, size_in = codes.shape
        room = self._scratch.dense(SLICE, x_NI.dtype)
        count = min(max(len(room) // size_in // 64 * 64, 1), size_out)
        for first in range(0, size_out, count):
            rows = min(count, size_out - first)
            dense_OI = room[: rows * size_in].view(rows, size_in)
            unpack(codes, first, dense_OI)
            _multiply(x_NI, dense_OI, out[:, first : first + rows])


class ScaledRun(_Run):
    """Product of 8-bit floats by 8-bit floats."""

    def _enqueue(self, product: Product) -> None:
        codes, out = product.codes, product.out
        codes_NI, scales_N1 = to_codes(product.x_NI)
        codes_IO = codes.codes_OB.view(torch.float8_e4m3fn).t()
        whole = _whole(out, len(out))
        torch._scaled_mm(
            codes_NI, codes_IO, scale_a=scales_N1, scale_b=codes.scales[None], out_dtype=out.dtype,
            use_fast_accum=True, out=whole,
        )  # fmt: skip
        if whole is not out:
            out.copy_(whole)


class _RoundedRun(_Run):
    """Products of 8-bit floats by 8-bit floats behind a launch that rounds the input."""

    def __init__(self, room: ProductRoom, kernel: ProductKernel) -> None:
        """Launch on the stream of `room`."""
        super().__init__(room, kernel)
        self._preparations = (Launch("the rounding of an input", room.pdl, writes=frozenset(("activations",))),)


class ScaledBlocksRun(_RoundedRun):
    """Product with scales of whole blocks, by cuBLAS."""

    def _enqueue(self, product: Product) -> None:
        codes, out = product.codes, product.out
        x = to_codes_of_groups(product.x_NI, codes.scales, len(codes.codes_OB), pdl=self._pdl)
        whole = _whole(out, len(x.codes_NI))
        torch._scaled_mm(
            x.codes_NI, codes.codes_OB.view(torch.float8_e4m3fn).t(), scale_a=x.scales_GN.t(), scale_b=x.blocks_LG.t(),
            out_dtype=out.dtype, use_fast_accum=False, out=whole,
        )  # fmt: skip
        if whole is not out:
            out.copy_(whole[: len(out)])


class ScaledTilesRun(_RoundedRun):
    """Product with scales of groups by Triton's tiles."""

    def _enqueue(self, product: Product) -> None:
        x, how = to_codes_of_groups(product.x_NI, pdl=self._pdl), scaled_tiling(len(product.x_NI), self._scratch.arch)
        scaled_tiles_linear(x, product.codes, product.out, how, pdl=self._pdl)


def _whole(out_NO: Tensor, rows: int) -> Tensor:
    """Return memory for `rows` rows of a product that cuBLAS can write to: `out_NO`, if it is such memory."""
    if len(out_NO) == rows and out_NO.is_contiguous():
        return out_NO
    return torch.empty(rows, out_NO.shape[1], dtype=out_NO.dtype, device=out_NO.device)


def _multiply(x_NI: Tensor, weight_OI: Tensor, out_NO: Tensor) -> None:
    """Compute `out = x W^T` by cuBLAS, in the dtype of `out_NO`."""
    if out_NO.dtype is x_NI.dtype:
        torch.mm(x_NI, weight_OI.t(), out=out_NO)
    else:
        torch.mm(x_NI, weight_OI.t(), out_dtype=out_NO.dtype, out=out_NO)
