"""The protocol of a product's kernels on CUDA, and the choice between them, made once for each weight.

Needs no GPU and imports no compiler: a choice can be made, and explained, for any GPU by its name. The kernels
themselves are declared in kernels.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, NamedTuple, Protocol, TypeVar, get_args

import torch

from headrace.ops.cuda.products.fusion import Fusion

if TYPE_CHECKING:
    from torch import Tensor

    from headrace.ops.cuda.adapters.rows import UpdateSite
    from headrace.ops.cuda.arch import Arch
    from headrace.ops.cuda.codes.kinds import Kind
    from headrace.ops.cuda.codes.layout import Codes
    from headrace.ops.cuda.hazards import Chain, Launch
    from headrace.ops.cuda.products.fusion import After, Before
    from headrace.ops.cuda.products.linear import LinearScratch

__all__ = [
    "FUSIONS", "ByRows", "ProductKernel", "ProductRoom", "ProductRun", "Resolved", "WeightShape", "resolve", "spans_of",
]  # fmt: skip

FUSIONS: tuple[Fusion, ...] = get_args(Fusion)
_FEW = 64
"""Rows up to which a lookup is an index."""
T = TypeVar("T")


class WeightShape(NamedTuple):
    """The properties of a weight that decide which kernels can multiply by it."""

    size_out: int
    """Output features; gates and ups both count."""
    size_in: int
    head_dim: int
    """Size of the model's heads, for a weight whose outputs are heads."""
    has_bias: bool = False
    dtype: torch.dtype = torch.bfloat16
    """Dtype of activations, and of a weight that is not quantised."""
    kind: Kind | None = None
    """Kind of the codes of a quantised weight; None for a dense one."""


class ProductRoom(NamedTuple):
    """What the kernels of one stream share."""

    scratch: LinearScratch
    eps: float
    """Epsilon of the model's norms."""
    pdl: bool
    """Whether kernels are launched while those before them still run (programmatic dependent launch)."""
    chain: Chain
    """Hears of every launch."""


class ProductRun(Protocol):
    """Protocol of a kernel that is ready to run on one stream."""

    def run(
        self,
        x_NI: Tensor,
        weight: Tensor | Codes,
        out: Tensor,
        before: Before = None,
        after: After = None,
        updates: UpdateSite | None = None,
    ) -> None:
        """Enqueue a product of one of the fusions that the kernel does not refuse.

        Args:
            x_NI: Input, last dimension contiguous.
            weight: Weight [O, I] as the kernel's `layout` returns it, or in codes.
            out: Output, last dimension contiguous; must not overlap the input.
            before: The norm of the input, or the squares whose factors it lacks; None where it needs nothing.
            after: What to make of the sums; None to round them to the dtype of `out`.
            updates: Updates of the one adapter that rows use, for kernels whose `has_updates` is True.
        """
        ...


class ProductKernel(Protocol):
    """Protocol of a kernel's declaration: what it refuses, where it pays, and how it is made ready."""

    @property
    def name(self) -> str:
        """Name in lists and messages."""
        ...

    @property
    def has_updates(self) -> bool:
        """Whether the kernel also exists with the updates of one adapter inside."""
        ...

    def lacks(self, arch: Arch, dtype: torch.dtype, head_dim: int) -> str | None:
        """Return why a GPU can run the kernel for no weight of such a model; None if it can for some."""
        ...

    def refuses(self, arch: Arch, weight: WeightShape, fusion: Fusion) -> str | None:
        """Return why the kernel cannot compute `fusion` with a weight on a GPU, in words; None if it can."""
        ...

    def rows(self, arch: Arch, weight: WeightShape, fusion: Fusion) -> range:
        """Return the numbers of rows for which the kernel pays, by the GPU's tuning; empty where it never does."""
        ...

    @property
    def layout(self) -> Callable[[Tensor], Tensor]:
        """Function that packs a dense weight [O, I] for the kernel; kernels with the same function share its result."""
        ...

    def builds(self, *, updates: bool) -> Sequence[Callable[[], object]]:
        """Return the functions that compile the kernel ahead, with updates or without; none if it is compiled late."""
        ...

    def launch(self, fusion: Fusion, *, updates: bool = False) -> Launch:
        """Return what a launch reads before it waits, and what it writes; `updates`: with an adapter's."""
        ...

    def open(self, room: ProductRoom) -> ProductRun:
        """Make the kernel ready to run on one stream; imports its compiler."""
        ...


class ByRows(Generic[T]):
    """A value for each of some ranges of rows."""

    __slots__ = ("_few", "spans")

    def __init__(self, spans: Sequence[tuple[range, T]]) -> None:
        """Keep disjoint ranges in ascending order, each with its value."""
        self.spans = tuple(spans)
        self._few = tuple(self._find(rows) for rows in range(_FEW + 1))

    def at(self, rows: int) -> T | None:
        """Return the value for a number of rows; None if there is none."""
        return self._few[rows] if rows <= _FEW else self._find(rows)

    def __getitem__(self, rows: int) -> T:
        """Return the value for a number of rows; raise `LookupError` if there is none."""
        found = self.at(rows)
        if found is None:
            raise LookupError(f"no kernel computes a product of {rows} rows")
        return found

    def _find(self, rows: int) -> T | None:
        return next((value for span, value in self.spans if rows in span), None)


@dataclass(frozen=True, slots=True)
class Resolved:
    """The kernel for each fusion and number of rows, for one weight; what no kernel computes is composed of others."""

    kernels: Mapping[Fusion, ByRows[ProductKernel]]
    refused: Mapping[Fusion, Mapping[str, str]]
    """Why each kernel is not used, in words, by its name."""


def resolve(kernels: Sequence[ProductKernel], arch: Arch, weight: WeightShape) -> Resolved:
    """Choose for every fusion the first of `kernels` that does not refuse and that pays, by ranges of rows."""
    chosen: dict[Fusion, ByRows[ProductKernel]] = {}
    refused: dict[Fusion, dict[str, str]] = {}
    for fusion in FUSIONS:
        why = {each.name: reason for each in kernels if (reason := each.refuses(arch, weight, fusion)) is not None}
        able = [(each.rows(arch, weight, fusion), each) for each in kernels if each.name not in why]
        why |= {each.name: f"does not pay by the numbers of {arch.tuning.chip}" for rows, each in able if not rows}
        chosen[fusion], refused[fusion] = ByRows(spans_of(able)), why
    return Resolved(chosen, refused)


def spans_of(able: Iterable[tuple[range, T]]) -> list[tuple[range, T]]:
    """Return disjoint ranges, each with the first kernel whose rows hold it."""
    known = [(rows, kernel) for rows, kernel in able if rows]
    ends = sorted({end for rows, _ in known for end in (rows.start, rows.stop)})
    spans: list[tuple[range, T]] = []
    for start, stop in zip(ends, ends[1:], strict=False):
        first = next((kernel for rows, kernel in known if start in rows), None)
        if first is None:
            continue
        if spans and spans[-1][1] is first and spans[-1][0].stop == start:
            spans[-1] = (range(spans[-1][0].start, stop), first)
        else:
            spans.append((range(start, stop), first))
    return spans
