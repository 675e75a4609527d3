"""The CPU's registry of product kernels: chooses one for each number of rows, once, when a weight is packed.

A kernel declares what it refuses and for how many rows it pays. Of those that refuse nothing, the first in the given
order that pays for a number of rows multiplies there. So a weight may be packed twice: in 4 bits for a few rows and
densely for more. A kernel for another format comes as one more element of the tuple.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, Protocol

from headrace.ops.cpu.linear import ANY_ROWS, Int4Kernel, OneDnnKernel, TorchKernel
from headrace.ops.cpu.native.linear import NativeKernel

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import torch
    from torch import Tensor

    from headrace.ops.cpu.linear import CpuLinear, KeptWeight
    from headrace.ops.formats import Stored

__all__ = ["PRODUCTS", "CpuKernel", "KernelChoice", "explain", "kept_by", "pack_product"]


class CpuKernel(Protocol):
    """Protocol of a kernel that multiplies activations by a stored weight on the CPU."""

    @property
    def name(self) -> str:
        """Short name for tables."""
        ...

    def refuses(self, weight: Stored, dtype: torch.dtype) -> str | None:
        """Return in words why this kernel cannot multiply by `weight` in `dtype` on this processor; None if it can.

        The answer may depend on format and shape, never on the numbers: `weight` may lie on the meta device.
        """
        ...

    def rows(self, weight: Stored) -> range:
        """Return for how many rows of activations the kernel pays."""
        ...

    def pack(self, weight: Stored, bias_O: Tensor | None, dtype: torch.dtype) -> CpuLinear:
        """Return the product, ready to run, with activations, bias and result in `dtype`.

        It keeps copies of its own or the parts themselves; the caller may drop `weight`.
        """
        ...

    def kept(self, weight: Stored, dtype: torch.dtype) -> Sequence[KeptWeight]:
        """Return what `pack` keeps of a weight, piece by piece; `weight` may lie on the meta device."""
        ...


PRODUCTS: tuple[CpuKernel, ...] = (NativeKernel(), Int4Kernel(), OneDnnKernel(), TorchKernel())
"""The kernels of a device that is given no others, in order of preference."""


class KernelChoice(NamedTuple):
    """Which kernels multiply by a weight, and why the others do not."""

    kernels: tuple[tuple[range, str], ...]
    """Numbers of rows, ascending and without a gap from 1 on, and the name of the kernel that multiplies there."""
    refusals: Mapping[str, str]
    """Reason by the name of the kernel that refuses, in order of preference."""


def pack_product(
    weight: Stored, bias_O: Tensor | None, *, dtype: torch.dtype, products: Sequence[CpuKernel] = PRODUCTS
) -> CpuLinear:
    """Pack a matrix [out, in] for products with activations in `dtype` (bfloat16 or float32).

    Raises:
        ValueError: No kernel of `products` multiplies by this weight for some number of rows.
    """
    bias_O = None if bias_O is None else bias_O.to(dtype)
    packed = [(rows[-1], kernel.pack(weight, bias_O, dtype)) for rows, kernel in _chosen(weight, dtype, products)]
    return packed[0][1] if len(packed) == 1 else _ByRows(packed)


def explain(weight: Stored, dtype: torch.dtype, products: Sequence[CpuKernel] = PRODUCTS) -> KernelChoice:
    """Return what `pack_product` would choose for a weight, which may lie on the meta device.

    Raises:
        ValueError: No kernel of `products` multiplies by this weight for some number of rows.
    """
    kernels = tuple((rows, kernel.name) for rows, kernel in _chosen(weight, dtype, products))
    return KernelChoice(kernels, _refusals(weight, dtype, products))


def kept_by(weight: Stored, dtype: torch.dtype, products: Sequence[CpuKernel] = PRODUCTS) -> list[KeptWeight]:
    """Return what `pack_product` keeps of a weight, which may lie on the meta device: for each kernel its packing.

    Raises:
        ValueError: No kernel of `products` multiplies by this weight for some number of rows.
    """
    kernels = dict.fromkeys(kernel for _, kernel in _chosen(weight, dtype, products))
    return [kept for kernel in kernels for kept in kernel.kept(weight, dtype)]


def _refusals(weight: Stored, dtype: torch.dtype, products: Sequence[CpuKernel]) -> dict[str, str]:
    refusals = ((kernel.name, kernel.refuses(weight, dtype)) for kernel in products)
    return {name: reason for name, reason in refusals if reason is not None}


def _chosen(weight: Stored, dtype: torch.dtype, products: Sequence[CpuKernel]) -> list[tuple[range, CpuKernel]]:
    """Return the kernel for each range of rows, in ascending order."""
    usable = [(kernel.rows(weight), kernel) for kernel in products if kernel.refuses(weight, dtype) is None]
    chosen: list[tuple[range, CpuKernel]] = []
    start = ANY_ROWS.start
    while start < ANY_ROWS.stop:
        best = next((kernel for rows, kernel in usable if start in rows), None)
        if best is None:
            reasons = "; ".join(f"{name}: {reason}" for name, reason in _refusals(weight, dtype, products).items())
            raise ValueError(
                f"no product kernel takes {start} rows and a weight {list(weight.shape)} in {weight.format.name}"
                + (f": {reasons}" if reasons else "")
            )
        # The next number of rows at which a range begins or ends.
        stop = min(edge for rows, _ in [(ANY_ROWS, best), *usable] for edge in (rows.start, rows.stop) if edge > start)
        if chosen and chosen[-1][1] is best:
            start, chosen = chosen[-1][0].start, chosen[:-1]
        chosen.append((range(start, stop), best))
        start = stop
    return chosen


class _ByRows:
    """Products for few rows and for more."""

    def __init__(self, products: Sequence[tuple[int, CpuLinear]]) -> None:
        self._products = products

    def __call__(self, x_NI: Tensor) -> Tensor:
        rows = x_NI.shape[0]
        return next(product for most, product in self._products if rows <= most)(x_NI)
