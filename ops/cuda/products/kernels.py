"""`PRODUCTS`: the declarations of all kernels of products on CUDA, the preferred ones first.

A new kernel is one class here, or anywhere else, that is named in a tuple like `PRODUCTS`. Imports no compiler; the
kernels run in running.py.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, ClassVar, Final

import torch

from headrace.ops.cuda.hazards import Launch, Thing
from headrace.ops.cuda.tuning.table import ANY

if TYPE_CHECKING:
    from torch import Tensor

    from headrace.ops.cuda.arch import Arch
    from headrace.ops.cuda.codes.kinds import Kind
    from headrace.ops.cuda.products.fusion import Fusion
    from headrace.ops.cuda.products.registry import ProductKernel, ProductRoom, ProductRun, WeightShape

__all__ = [
    "NOWHERE", "PRODUCTS", "WITH_BIAS", "CublasProducts", "EvenHeadProducts", "EvenProducts", "FewRowsGatedProducts",
    "FewRowsProducts", "KernelOfProducts", "TileProducts", "VectorProducts", "dense", "lacks_bfloat16", "up_to",
]  # fmt: skip

_LINE = 64
"""Features in one copy of csrc/few_rows.cuh."""
_PIECE = 8
"""Features in 16 bytes."""
_HEAD = 128
_VECTOR_INPUTS = 4096
_VECTOR_ROWS, _TRITON_ROWS, _SOURCE_ROWS = 8, 64, 64
"""Most rows of vector.py, linear.py and csrc/few_rows.cuh, whatever a tuning says."""
NOWHERE: Final = range(0)
WITH_BIAS: Final = "a bias comes between its product and what follows it"


def dense(weight_OI: Tensor) -> Tensor:
    """Return a weight row by row, contiguous."""
    return weight_OI.contiguous()


def up_to(most: int, rows: range) -> range:
    """Return the rows that a kernel of at most `most` rows can compute."""
    return range(rows.start, min(rows.stop, most + 1))


def lacks_bfloat16(dtype: torch.dtype) -> str | None:
    """Return what a kernel for bfloat16 alone misses with activations in another dtype."""
    return None if dtype == torch.bfloat16 else f"takes bfloat16, not {str(dtype).removeprefix('torch.')}"


class KernelOfProducts:
    """What most kernels have in common."""

    name: str
    has_updates: ClassVar[bool] = False
    fuses: ClassVar[frozenset[Fusion]]
    early: ClassVar[frozenset[Thing]] = frozenset()
    overlaps: ClassVar[bool] = True
    kind: Kind | None = None
    """Kind of the codes that the kernel multiplies by; None for dense weights."""

    def lacks(self, arch: Arch, dtype: torch.dtype, head_dim: int) -> str | None:
        """Return None: any GPU that the engine opens on can run the kernel."""
        return None

    def refuses(self, arch: Arch, weight: WeightShape, fusion: Fusion) -> str | None:
        """Return why the kernel cannot compute `fusion` with a weight on a GPU; None if it can."""
        if fusion not in self.fuses:
            return "does not fuse this"
        if weight.kind != self.kind:
            taken, given = ("dense weights" if kind is None else kind.name for kind in (self.kind, weight.kind))
            return f"multiplies by {taken}, not {given}"
        return self.lacks(arch, weight.dtype, weight.head_dim) or self._misfit(weight, fusion)

    def _misfit(self, weight: WeightShape, fusion: Fusion) -> str | None:
        """Return what is wrong with a weight."""
        return None

    @property
    def layout(self) -> Callable[[Tensor], Tensor]:
        """Function that packs a weight row by row."""
        return dense

    def builds(self, *, updates: bool) -> Sequence[Callable[[], object]]:
        """Return nothing: the kernel is compiled when it first runs, or comes compiled."""
        return ()

    def launch(self, fusion: Fusion, *, updates: bool = False) -> Launch:
        """Return what a launch reads before it waits, and what it writes; `updates`: with an adapter's."""
        early = self.early | frozenset[Thing](("adapters",)) if updates else self.early
        writes: frozenset[Thing] = frozenset(("activations", "new keys") if fusion == "heads" else ("activations",))
        return Launch(f"the product {self.name!r}", self.overlaps, early, writes)


class _Compiled(KernelOfProducts):
    """Kernels of csrc/ that need Hopper's matrix products."""

    source: ClassVar[str]

    def lacks(self, arch: Arch, dtype: torch.dtype, head_dim: int) -> str | None:
        """Return what the kernel misses: bfloat16, or Hopper."""
        return lacks_bfloat16(dtype) or arch.lacks("wgmma")


class _FewRowsOfSource(_Compiled):
    """Kernels of csrc/few_rows.cuh, which read their weights while the kernel before still runs."""

    has_updates = True
    early = frozenset(("weights",))
    dense_name: ClassVar[str]

    def __init__(self, kind: Kind | None = None) -> None:
        """Multiply by codes of `kind`, or by dense weights."""
        self.kind = kind
        self.name = self.dense_name if kind is None else f"{self.dense_name}, {kind.name}"

    def builds(self, *, updates: bool) -> Sequence[Callable[[], object]]:
        """Return the function that compiles the source for each of its numbers of rows; none for codes it refuses."""
        if self.kind is not None and self.kind.beyond_source is not None:
            return ()
        macros = {} if self.kind is None else self.kind.macros
        return (partial(_build_for_rows, self.source, updates, macros),)

    def lacks(self, arch: Arch, dtype: torch.dtype, head_dim: int) -> str | None:
        """Return what the kernel misses: codes that it knows, bfloat16, or Hopper."""
        return (self.kind and self.kind.beyond_source) or super().lacks(arch, dtype, head_dim)

    def rows(self, arch: Arch, weight: WeightShape, fusion: Fusion) -> range:
        """Return the rows for which reading the weight is all the work."""
        return up_to(_SOURCE_ROWS, arch.tuning.even_rows if self.kind is None else arch.tuning.coded_rows)


def _build_for_rows(source: str, updates: bool, macros: Mapping[str, int]) -> None:
    from headrace.ops.cuda.compiling.source import build_for_rows

    build_for_rows(source, updates=updates, **macros)


def _build_tile_linear() -> None:
    from headrace.ops.cuda.compiling.source import compiled

    compiled("tile_linear")


class VectorProducts(KernelOfProducts):
    """Products of one row without tensor cores (vector.py), with the norm before and the activation after."""

    name = "vector"
    fuses = frozenset(("plain", "logits", "gated", "norm plain", "norm gated"))
    early = frozenset(("weights",))

    def _misfit(self, weight: WeightShape, fusion: Fusion) -> str | None:
        if weight.has_bias and fusion in ("gated", "norm gated"):
            return WITH_BIAS
        if fusion.startswith("norm") and weight.size_in > _VECTOR_INPUTS:
            return f"computes norms of up to {_VECTOR_INPUTS} features, not {weight.size_in}"
        return None

    def rows(self, arch: Arch, weight: WeightShape, fusion: Fusion) -> range:
        """Return one row; none for the norm of a long input, which every program would compute again."""
        tuning = arch.tuning
        is_long = fusion.startswith("norm") and weight.size_in > tuning.vector_norm_inputs
        return NOWHERE if is_long else up_to(_VECTOR_ROWS, tuning.vector_rows)

    def open(self, room: ProductRoom) -> ProductRun:
        """Return the Triton kernel."""
        from headrace.ops.cuda.products.running import VectorRun

        return VectorRun(room, self)


class EvenHeadProducts(_FewRowsOfSource):
    """Products that become rotated queries and stored keys and values (even_heads.py)."""

    dense_name = "even heads"
    source = "even_heads"
    fuses = frozenset(("heads",))

    def lacks(self, arch: Arch, dtype: torch.dtype, head_dim: int) -> str | None:
        """Return what the kernel misses: heads of its size, bfloat16, or Hopper."""
        if head_dim != _HEAD:
            return f"heads are of {head_dim}, the kernel takes {_HEAD}"
        return super().lacks(arch, dtype, head_dim)

    def _misfit(self, weight: WeightShape, fusion: Fusion) -> str | None:
        if weight.has_bias:
            return WITH_BIAS
        if weight.size_out % _HEAD:
            return f"{weight.size_out} outputs are no heads of {_HEAD}"
        return f"{weight.size_in} inputs, the kernel takes multiples of {_LINE}" if weight.size_in % _LINE else None

    def open(self, room: ProductRoom) -> ProductRun:
        """Return the kernel of csrc/."""
        from headrace.ops.cuda.products.running import EvenHeadsRun

        return EvenHeadsRun(room, self)


class EvenProducts(_FewRowsOfSource):
    """Products of few rows in which all multiprocessors read for the same time (even_linear.py)."""

    dense_name = "even"
    source = "even_linear"
    fuses = frozenset(("plain", "gated", "residual", "factors plain", "factors gated"))

    def _misfit(self, weight: WeightShape, fusion: Fusion) -> str | None:
        if weight.has_bias and fusion not in ("plain", "factors plain"):
            return WITH_BIAS
        multiple = 2 * _PIECE if fusion.startswith("factors") else _LINE
        if self.kind is not None and fusion.endswith("gated"):
            multiple = 2 * _LINE  # scales of ups are copied in pieces of their own
        if weight.size_out % multiple:
            return f"{weight.size_out} outputs, the kernel takes multiples of {multiple}"
        return f"{weight.size_in} inputs, the kernel takes multiples of {_LINE}" if weight.size_in % _LINE else None

    def rows(self, arch: Arch, weight: WeightShape, fusion: Fusion) -> range:
        """Return the rows for which reading the weight is all the work; none for a weight of too many elements."""
        is_large = self.kind is None and weight.size_out * weight.size_in > arch.tuning.even_weights
        return NOWHERE if is_large and not fusion.startswith("factors") else super().rows(arch, weight, fusion)

    def open(self, room: ProductRoom) -> ProductRun:
        """Return the kernel of csrc/."""
        from headrace.ops.cuda.products.running import EvenRun

        return EvenRun(room, self)


class TileProducts(_Compiled):
    """Products of gates and ups for many rows, with the activation inside (many_rows.py)."""

    name = "tile"
    source = "tile_linear"
    fuses = frozenset(("gated",))

    def _misfit(self, weight: WeightShape, fusion: Fusion) -> str | None:
        if weight.has_bias:
            return WITH_BIAS
        if weight.size_out % (2 * _PIECE) or weight.size_in % _PIECE:
            return f"{weight.size_out // 2} gates of {weight.size_in} inputs, the kernel takes multiples of {_PIECE}"
        return None

    def rows(self, arch: Arch, weight: WeightShape, fusion: Fusion) -> range:
        """Return the rows for which arithmetic is the limit."""
        return arch.tuning.tile_rows

    def builds(self, *, updates: bool) -> Sequence[Callable[[], object]]:
        """Return the function that compiles the source."""
        return () if updates else (_build_tile_linear,)

    def open(self, room: ProductRoom) -> ProductRun:
        """Return the kernel of csrc/."""
        from headrace.ops.cuda.products.running import TileRun

        return TileRun(room, self)


class _Triton(KernelOfProducts):
    """Products of few rows in Triton (linear.py)."""

    def _misfit(self, weight: WeightShape, fusion: Fusion) -> str | None:
        if weight.size_in % _LINE:
            return f"{weight.size_in} inputs, the kernel takes multiples of {_LINE}"
        return WITH_BIAS if weight.has_bias and fusion == "gated" else None


class FewRowsGatedProducts(_Triton):
    """Products of gates and ups for few rows, with the activation inside."""

    name = "few rows gated"
    fuses = frozenset(("gated",))
    early = frozenset(("weights",))

    def rows(self, arch: Arch, weight: WeightShape, fusion: Fusion) -> range:
        """Return few rows; none for a weight with which the activation inside saves too little traffic."""
        is_small = weight.size_out // 2 < arch.tuning.few_rows_gated_outputs
        return NOWHERE if is_small else up_to(_TRITON_ROWS, arch.tuning.few_rows)

    def open(self, room: ProductRoom) -> ProductRun:
        """Return the Triton kernel."""
        from headrace.ops.cuda.products.running import FewRowsGatedRun

        return FewRowsGatedRun(room, self)


class FewRowsProducts(_Triton):
    """Products of few rows that read their weight once."""

    name = "few rows"
    fuses = frozenset(("plain", "logits"))

    def rows(self, arch: Arch, weight: WeightShape, fusion: Fusion) -> range:
        """Return the rows for which reading the weight is all the work."""
        return up_to(_TRITON_ROWS, arch.tuning.few_rows)

    def open(self, room: ProductRoom) -> ProductRun:
        """Return the Triton kernel."""
        from headrace.ops.cuda.products.running import FewRowsRun

        return FewRowsRun(room, self)


class CublasProducts(KernelOfProducts):
    """Products of any number of rows, by cuBLAS."""

    name = "cuBLAS"
    fuses = frozenset(("plain", "logits"))
    overlaps = False

    def rows(self, arch: Arch, weight: WeightShape, fusion: Fusion) -> range:
        """Return any number of rows: what no other kernel takes is left to this one."""
        return ANY

    def open(self, room: ProductRoom) -> ProductRun:
        """Return torch's product."""
        from headrace.ops.cuda.products.running import CublasRun

        return CublasRun(room, self)


PRODUCTS: Final[tuple[ProductKernel, ...]] = (
    VectorProducts(),
    EvenHeadProducts(),
    EvenProducts(),
    TileProducts(),
    FewRowsGatedProducts(),
    FewRowsProducts(),
    CublasProducts(),
)
