"""`Products`: packs weights for the kernels of one stream, each chosen once for every fusion and number of rows."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, NamedTuple

import torch

from headrace.ops.cuda.products.kernels import PRODUCTS, dense
from headrace.ops.cuda.products.registry import (
    ByRows,
    ProductKernel,
    ProductRoom,
    ProductRun,
    Resolved,
    WeightShape,
    resolve,
)
from headrace.ops.cuda.tuning.table import ANY

if TYPE_CHECKING:
    from torch import Tensor

    from headrace.ops.cuda.adapters.rows import UpdateSite
    from headrace.ops.cuda.arch import Arch
    from headrace.ops.cuda.codes.kinds import Kind
    from headrace.ops.cuda.codes.layout import Codes
    from headrace.ops.cuda.products.fusion import After, Before, Fusion

__all__ = ["Chosen", "CudaProduct", "Products", "Runs"]


class Chosen(NamedTuple):
    """A kernel that is ready to run, and which of a weight's layouts it reads."""

    run: ProductRun
    layout: int


@dataclass(frozen=True, slots=True)
class Runs:
    """The kernel of each fusion by the number of rows; none where a fusion is composed of others."""

    plain: ByRows[Chosen]
    logits: ByRows[Chosen]
    gated: ByRows[Chosen]
    residual: ByRows[Chosen]
    norm_plain: ByRows[Chosen]
    norm_gated: ByRows[Chosen]
    factors_plain: ByRows[Chosen]
    factors_gated: ByRows[Chosen]
    heads: ByRows[Chosen]

    def tables(self) -> Iterator[ByRows[Chosen]]:
        """Return the kernels of all fusions."""
        return (getattr(self, field.name) for field in fields(self))


class CudaProduct(NamedTuple):
    """A weight [O, I] in the layouts that its kernels read, its bias, and these kernels."""

    size_out: int
    weight_OI: Tensor | None
    """The weight row by row, contiguous, which the kernels of adapters for one row read; None for a quantised one."""
    bias_O: Tensor | None
    layouts: tuple[Tensor | Codes, ...]
    runs: Runs

    def run(
        self,
        chosen: Chosen,
        x_NI: Tensor,
        out: Tensor,
        before: Before = None,
        after: After = None,
        updates: UpdateSite | None = None,
    ) -> None:
        """Enqueue the product by one of the kernels of `runs`, with the arguments of `ProductRun.run`."""
        chosen.run.run(x_NI, self.layouts[chosen.layout], out, before, after, updates)


class _Pieces:
    """Product with weights of several kinds of codes, one above the other, by the kernels of each."""

    def __init__(self, products: Sequence[CudaProduct]) -> None:
        """Multiply by `products`, in the order of their outputs."""
        self._products = products

    def run(
        self,
        x_NI: Tensor,
        _weight: Tensor | Codes,
        out: Tensor,
        before: Before = None,
        after: After = None,
        updates: UpdateSite | None = None,
    ) -> None:
        """Enqueue the product alone, or logits, of each weight, whatever weight is given."""
        assert before is None and after is None and updates is None
        first = 0
        for each in self._products:
            table = each.runs.plain if out.dtype == x_NI.dtype else each.runs.logits
            each.run(table[len(x_NI)], x_NI, out[:, first : first + each.size_out])
            first += each.size_out


class Products:
    """The kernels of one stream."""

    def __init__(self, arch: Arch, room: ProductRoom, kernels: Sequence[ProductKernel] = PRODUCTS) -> None:
        """Choose among `kernels`, of which the first are preferred, for the GPU `arch`."""
        self.arch, self.room, self._kernels = arch, room, kernels
        self._layouts = list(dict.fromkeys((dense, *(kernel.layout for kernel in kernels))))
        self._chosen: dict[str, Chosen] = {}
        self._runs: dict[WeightShape, Runs] = {}
        self.has_pieces = False
        """Whether a weight was packed that is multiplied piece by piece."""

    def resolved(self, weight: WeightShape) -> Resolved:
        """Return the choice for a weight."""
        return resolve(self._kernels, self.arch, weight)

    @property
    def kinds(self) -> frozenset[Kind | None]:
        """Kinds of codes of the weights that were packed; None stands for dense ones."""
        return frozenset(shape.kind for shape in self._runs)

    def pack(self, weight: Tensor | Codes, bias_O: Tensor | None, head_dim: int, dtype: torch.dtype) -> CudaProduct:
        """Pack a weight [O, I] of a model with activations in `dtype`, whose heads have `head_dim` features.

        Codes are multiplied as they are; dense weights are packed in each layout that one of their kernels reads.
        """
        size_out, size_in = weight.shape
        kind = None if isinstance(weight, torch.Tensor) else weight.kind
        shape = WeightShape(size_out, size_in, head_dim, bias_O is not None, dtype, kind)
        runs = self._runs.get(shape)
        if runs is None:
            runs = self._runs[shape] = self._ready(self.resolved(shape))
        if not isinstance(weight, torch.Tensor):
            return CudaProduct(size_out, None, bias_O, (weight,) * len(self._layouts), runs)
        used = {chosen.layout for table in runs.tables() for _, chosen in table.spans}
        rows_OI = dense(weight)
        layouts = tuple(
            self._layouts[place](weight) if place in used and place else rows_OI for place in range(len(self._layouts))
        )
        return CudaProduct(size_out, rows_OI, bias_O, layouts, runs)

    def pack_codes(
        self, pieces: Sequence[Codes], bias_O: Tensor | None, head_dim: int, dtype: torch.dtype
    ) -> CudaProduct:
        """Pack weights in codes, one above the other, as `pack` does; several are multiplied one after the other.

        Several fuse nothing: what is computed with their product is composed of other kernels.
        """
        if len(pieces) == 1:
            return self.pack(pieces[0], bias_O, head_dim, dtype)
        self.has_pieces = True
        products = [self.pack(piece, None, head_dim, dtype) for piece in pieces]
        each, none = ByRows([(ANY, Chosen(_Pieces(products), 0))]), ByRows[Chosen]([])
        runs = Runs(
            plain=each, logits=each, gated=none, residual=none, norm_plain=none, norm_gated=none,
            factors_plain=none, factors_gated=none, heads=none,
        )  # fmt: skip
        return CudaProduct(sum(product.size_out for product in products), None, bias_O, (pieces[0],), runs)

    def _ready(self, resolved: Resolved) -> Runs:
        def ready(fusion: Fusion) -> ByRows[Chosen]:
            return ByRows([(rows, self._open(kernel)) for rows, kernel in resolved.kernels[fusion].spans])

        return Runs(
            plain=ready("plain"), logits=ready("logits"), gated=ready("gated"), residual=ready("residual"),
            norm_plain=ready("norm plain"), norm_gated=ready("norm gated"),
            factors_plain=ready("factors plain"), factors_gated=ready("factors gated"), heads=ready("heads"),
        )  # fmt: skip

    def _open(self, kernel: ProductKernel) -> Chosen:
        """Make a kernel ready, once for all weights."""
        found = self._chosen.get(kernel.name)
        if found is None:
            found = self._chosen[kernel.name] = Chosen(kernel.open(self.room), self._layouts.index(kernel.layout))
        return found
