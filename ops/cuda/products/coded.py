"""`coded`: the declarations of the kernels that multiply by weights in codes; never decides what is stored in codes.

Up to 64 rows codes go through the ring of csrc/few_rows.cuh and become bf16 in registers. Where the ring lacks the GPU
or refuses the weight, one or two rows are multiplied without tensor cores, and more by Triton's tiles. Some more than
64 rows go through the ring in passes, and more by csrc/many_rows.cu. Prompts of many tokens, and what these refuse,
multiply by a dense copy, made in slices. Where weights are 8-bit floats, and the GPU multiplies these by each other,
more than 64 rows are rounded to such floats, too. Imports no compiler.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, ClassVar

from headrace.ops.cuda.codes.kinds import E4M3, Kind
from headrace.ops.cuda.products.kernels import (
    NOWHERE,
    WITH_BIAS,
    EvenHeadProducts,
    EvenProducts,
    KernelOfProducts,
    lacks_bfloat16,
    up_to,
)
from headrace.ops.cuda.tuning.table import ANY

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    import torch
    from torch import Tensor

    from headrace.ops.cuda.arch import Arch
    from headrace.ops.cuda.hazards import Launch
    from headrace.ops.cuda.products.fusion import Fusion
    from headrace.ops.cuda.products.registry import ProductKernel, ProductRoom, ProductRun, WeightShape

__all__ = [
    "CodedTilesProducts", "CodedVectorProducts", "ManyRowsProducts", "OrderedProducts", "PassesProducts",
    "ScaledBlocksProducts", "ScaledProducts", "ScaledTilesProducts", "UnpackedProducts", "coded",
]  # fmt: skip

_EIGHT = 8
"""Outputs in 16 bytes."""
_LINE = 64
"""Inputs in 128 bytes, and gates whose constants begin at a multiple of 16 bytes in every kind of codes."""
_VECTOR_ROWS, _TILE_ROWS = 8, 64
"""Most rows of coded_vector.py and coded_tiles.py, whatever a tuning says."""
_FLOATS, _BLOCKS = Kind(E4M3), Kind(E4M3, 128, blocks=True)
_FOUR_GROUPS = 512
"""Inputs of four groups."""


class _CodedProducts(KernelOfProducts):
    """What kernels for codes alone have in common."""

    way: ClassVar[str]
    """Name of the kernel without that of the codes."""

    def __init__(self, kind: Kind) -> None:
        """Multiply by codes of `kind`."""
        self.kind = kind
        self.name = f"{self.way}, {kind.name}"


class _FewRowsOfCodes(_CodedProducts):
    """Kernels that read their weight once, with the activation after."""

    fuses = frozenset(("plain", "logits", "gated"))
    early = frozenset(("weights",))

    def lacks(self, arch: Arch, dtype: torch.dtype, head_dim: int) -> str | None:
        """Return what the kernel misses: bfloat16."""
        return lacks_bfloat16(dtype)

    def _misfit(self, weight: WeightShape, fusion: Fusion) -> str | None:
        return WITH_BIAS if weight.has_bias and fusion == "gated" else None


class CodedVectorProducts(_FewRowsOfCodes):
    """Products of very few rows without tensor cores (coded_vector.py), with the activation after."""

    way = "vector"

    def rows(self, arch: Arch, weight: WeightShape, fusion: Fusion) -> range:
        """Return the rows for which reading the weight is all the work."""
        return up_to(_VECTOR_ROWS, arch.tuning.coded_vector_rows)

    def open(self, room: ProductRoom) -> ProductRun:
        """Return the Triton kernel."""
        from headrace.ops.cuda.products.running import CodedVectorRun

        return CodedVectorRun(room, self)


class CodedTilesProducts(_FewRowsOfCodes):
    """Products of few rows that read their weight once (coded_tiles.py), with the activation after."""

    way = "tiles"

    def rows(self, arch: Arch, weight: WeightShape, fusion: Fusion) -> range:
        """Return the rows for which reading the weight is all the work."""
        return up_to(_TILE_ROWS, arch.tuning.coded_tile_rows)

    def open(self, room: ProductRoom) -> ProductRun:
        """Return the Triton kernel."""
        from headrace.ops.cuda.products.running import CodedTilesRun

        return CodedTilesRun(room, self)


class PassesProducts(EvenProducts):
    """Products of some more rows than 64 by the kernel for 64 (even_linear.py), which reads the weight for each 64."""

    dense_name = "even in passes"
    fuses = frozenset(("plain", "gated"))
    has_updates = False

    def rows(self, arch: Arch, weight: WeightShape, fusion: Fusion) -> range:
        """Return the rows for which reading the weight again costs less than a dense copy of it."""
        return NOWHERE if _is_rounded(self.kind, arch, weight) else arch.tuning.coded_pass_rows

    def open(self, room: ProductRoom) -> ProductRun:
        """Return the kernel of csrc/."""
        from headrace.ops.cuda.products.running import PassesRun

        return PassesRun(room, self)


class ManyRowsProducts(_CodedProducts):
    """Products of more than 64 rows that bring codes to tensor cores (many_rows.py), with the activation after."""

    way = "many rows"
    fuses = frozenset(("plain", "gated"))
    early = frozenset(("weights",))

    def lacks(self, arch: Arch, dtype: torch.dtype, head_dim: int) -> str | None:
        """Return what the kernel misses: codes that it knows, bfloat16, or Hopper."""
        return (self.kind and self.kind.beyond_source) or lacks_bfloat16(dtype) or arch.lacks("wgmma")

    def _misfit(self, weight: WeightShape, fusion: Fusion) -> str | None:
        if weight.has_bias and fusion == "gated":
            return WITH_BIAS
        multiple = 2 * _LINE if fusion == "gated" else _EIGHT  # the copy engine fetches constants of ups apart
        if weight.size_out % multiple:
            return f"{weight.size_out} outputs, the kernel takes multiples of {multiple}"
        return f"{weight.size_in} inputs, the kernel takes multiples of {_LINE}" if weight.size_in % _LINE else None

    def rows(self, arch: Arch, weight: WeightShape, fusion: Fusion) -> range:
        """Return the rows for which reading the weight is not all the work."""
        return NOWHERE if _is_rounded(self.kind, arch, weight) else arch.tuning.coded_many_rows

    def builds(self, *, updates: bool) -> Sequence[Callable[[], object]]:
        """Return the function that compiles the source; none for codes it refuses."""
        if updates or self.kind is None or self.kind.beyond_source is not None:
            return ()
        return (functools.partial(_build_many_rows, self.kind.macros),)

    def open(self, room: ProductRoom) -> ProductRun:
        """Return the kernel of csrc/."""
        from headrace.ops.cuda.products.running import ManyRowsRun

        return ManyRowsRun(room, self)


def _build_many_rows(macros: Mapping[str, int]) -> None:
    from headrace.ops.cuda.compiling.source import compiled

    compiled("many_rows", **macros)


class UnpackedProducts(_CodedProducts):
    """Products of any number of rows with a dense copy of the weight, made slice by slice (unpacked.py)."""

    way = "unpacked"
    fuses = frozenset(("plain", "logits"))
    overlaps = False

    def rows(self, arch: Arch, weight: WeightShape, fusion: Fusion) -> range:
        """Return any number of rows: what no other kernel takes is left to this one."""
        return ANY

    def open(self, room: ProductRoom) -> ProductRun:
        """Return torch's product behind a Triton kernel."""
        from headrace.ops.cuda.products.running import UnpackedRun

        return UnpackedRun(room, self)


class ScaledProducts(_CodedProducts):
    """Products of 8-bit floats by 8-bit floats for many rows; inputs are quantised row by row (scaled/inputs.py)."""

    way = "scaled"
    fuses = frozenset(("plain",))
    overlaps = False

    def lacks(self, arch: Arch, dtype: torch.dtype, head_dim: int) -> str | None:
        """Return what the kernel misses: products of 8-bit floats."""
        return arch.lacks("wgmma")

    def _misfit(self, weight: WeightShape, fusion: Fusion) -> str | None:
        if self.kind != _FLOATS:
            return "multiplies by 8-bit floats with a scale for each output"
        sizes = (weight.size_out, weight.size_in)
        return f"takes multiples of 16 outputs and inputs, not {sizes}" if any(size % 16 for size in sizes) else None

    def rows(self, arch: Arch, weight: WeightShape, fusion: Fusion) -> range:
        """Return the rows for which reading the weight is not all the work."""
        return range(arch.tuning.coded_rows.stop, ANY.stop)

    def open(self, room: ProductRoom) -> ProductRun:
        """Return torch's product behind a Triton kernel."""
        from headrace.ops.cuda.products.running import ScaledRun

        return ScaledRun(room, self)


class ScaledBlocksProducts(_CodedProducts):
    """Products of 8-bit floats in whole blocks by 8-bit floats for many rows; inputs are quantised in groups."""

    way = "scaled blocks"
    fuses = frozenset(("plain",))
    overlaps = False

    def lacks(self, arch: Arch, dtype: torch.dtype, head_dim: int) -> str | None:
        """Return what the kernel misses: codes that it knows, bfloat16, or cuBLAS's products of blocks."""
        return _beyond(self.kind, _BLOCKS) or lacks_bfloat16(dtype) or arch.lacks("wgmma")

    def _misfit(self, weight: WeightShape, fusion: Fusion) -> str | None:
        # Scales of so many inputs need no padding, of which versions of torch have different ideas.
        return f"takes multiples of {_FOUR_GROUPS} inputs" if weight.size_in % _FOUR_GROUPS else None

    def rows(self, arch: Arch, weight: WeightShape, fusion: Fusion) -> range:
        """Return the rows for which reading the weight is not all the work."""
        return range(arch.tuning.coded_rows.stop, ANY.stop)

    def open(self, room: ProductRoom) -> ProductRun:
        """Return torch's product behind a Triton kernel."""
        from headrace.ops.cuda.products.running import ScaledBlocksRun

        return ScaledBlocksRun(room, self)


class ScaledTilesProducts(_CodedProducts):
    """Products of 8-bit floats by 8-bit floats with scales of groups by Triton's tiles (scaled/tiles.py)."""

    way = "scaled tiles"
    fuses = frozenset(("plain",))

    def lacks(self, arch: Arch, dtype: torch.dtype, head_dim: int) -> str | None:
        """Return what the kernel misses: codes that it knows, bfloat16, or 8-bit floats."""
        return _beyond(self.kind, _BLOCKS, _BLOCKS.in_lines) or lacks_bfloat16(dtype) or arch.lacks("fp8")

    def rows(self, arch: Arch, weight: WeightShape, fusion: Fusion) -> range:
        """Return the rows for which reading the weight is not all the work; on Hopper other kernels are faster."""
        return NOWHERE if arch.has("wgmma") else range(arch.tuning.coded_rows.stop, ANY.stop)

    def open(self, room: ProductRoom) -> ProductRun:
        """Return Triton's kernels."""
        from headrace.ops.cuda.products.running import ScaledTilesRun

        return ScaledTilesRun(room, self)


def _beyond(kind: Kind | None, *taken: Kind) -> str | None:
    """Return why a kernel that takes some kinds of codes refuses another."""
    names = " and ".join(each.name for each in taken)
    return None if kind in taken else f"multiplies by {names}, not {kind.name if kind else 'dense weights'}"


def _is_rounded(kind: Kind | None, arch: Arch, weight: WeightShape) -> bool:
    """Return whether a product of more than 64 rows is one of cuBLAS's by 8-bit floats: with the activation in a kernel
    of its own behind it, it is faster than kernels with the activation inside that multiply by numbers of 16 bits."""
    scaled: tuple[ProductKernel, ...] = () if kind is None else (ScaledProducts(kind), ScaledBlocksProducts(kind))
    return any(each.refuses(arch, weight, "plain") is None for each in scaled)


class OrderedProducts:
    """Products with codes whose columns lie in an order of their own: a kernel for others, after the input's gather."""

    has_updates = False  # an adapter's update is of the input in its own order

    def __init__(self, kind: Kind, inner: ProductKernel) -> None:
        """Multiply by codes of `kind` with a kernel for the same in the order of the inputs."""
        self.kind, self._inner = kind, inner
        self.name = inner.name.replace(kind.in_order.name, kind.name)

    def lacks(self, arch: Arch, dtype: torch.dtype, head_dim: int) -> str | None:
        """Return what the inner kernel misses."""
        return self._inner.lacks(arch, dtype, head_dim)

    def refuses(self, arch: Arch, weight: WeightShape, fusion: Fusion) -> str | None:
        """Return why the inner kernel cannot compute `fusion` with a weight on a GPU; None if it can."""
        if weight.kind == self.kind:
            return self._inner.refuses(arch, weight._replace(kind=self.kind.in_order), fusion)
        return f"multiplies by {self.kind.name}, not {'dense weights' if weight.kind is None else weight.kind.name}"

    def rows(self, arch: Arch, weight: WeightShape, fusion: Fusion) -> range:
        """Return the rows for which the inner kernel pays."""
        return self._inner.rows(arch, weight, fusion)

    @property
    def layout(self) -> Callable[[Tensor], Tensor]:
        """Function that packs a dense weight, of which there is none."""
        return self._inner.layout

    def builds(self, *, updates: bool) -> Sequence[Callable[[], object]]:
        """Return the functions that compile the inner kernel ahead."""
        return () if updates else self._inner.builds(updates=False)

    def launch(self, fusion: Fusion, *, updates: bool = False) -> Launch:
        """Return what the launch of the inner kernel reads before it waits, and what it writes."""
        return self._inner.launch(fusion, updates=updates)

    def open(self, room: ProductRoom) -> ProductRun:
        """Return the inner kernel behind a Triton kernel."""
        from headrace.ops.cuda.products.running import OrderedRun

        return OrderedRun(room, self._inner.open(room))


@functools.cache
def coded(kind: Kind) -> tuple[ProductKernel, ...]:
    """Return the kernels for one kind of codes, the preferred ones first."""
    if kind.ordered:
        return tuple(OrderedProducts(kind, inner) for inner in coded(kind.in_order))
    return (
        EvenHeadProducts(kind), EvenProducts(kind), CodedVectorProducts(kind), CodedTilesProducts(kind),
        ScaledProducts(kind), ScaledBlocksProducts(kind), ScaledTilesProducts(kind), PassesProducts(kind),
        ManyRowsProducts(kind), UnpackedProducts(kind),
    )  # fmt: skip
