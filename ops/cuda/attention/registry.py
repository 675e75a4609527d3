"""The protocols of attention's kernels on CUDA, and the choice between them, made once for each model.

Needs no GPU and imports no compiler: a choice can be made, and explained, for any GPU by its name. The kernels
themselves are declared in kernels.py.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Protocol, TypeVar

if TYPE_CHECKING:
    import torch

    from headrace.ops.cuda.arch import Arch
    from headrace.ops.cuda.attention.shape import HeadShape
    from headrace.ops.cuda.attention.steps import DecodeStep, PrefillAttention, WholeStep
    from headrace.ops.cuda.fused import DecodeInputs
    from headrace.ops.cuda.tuning.table import Span, Tuning

__all__ = ["DecodeChoice", "DecodeKernel", "DecodeRoom", "PrefillKernel", "resolve_decode", "resolve_prefill"]

T = TypeVar("T")

_TILE: Final = 16  # rows of a tile of the tensor cores


class DecodeRoom:
    """What the attention of all decode graphs of one stream shares."""

    def __init__(self, arch: Arch, device: torch.device, *, most_rows: int, pdl: bool) -> None:
        """Start empty, for batches of up to `most_rows` lines: rows, where these have one each."""
        self.arch, self.device, self.most_rows, self.pdl = arch, device, most_rows, pdl
        self._kept: dict[tuple[str, Hashable], Any] = {}

    def keep(self, name: str, key: Hashable, make: Callable[[], T]) -> T:
        """Return what was made under a name for a key, such as the sizes of heads; call `make` the first time."""
        kept: dict[tuple[str, Hashable], T] = self._kept
        if (name, key) not in kept:
            kept[name, key] = make()
        return kept[name, key]

    def close(self) -> None:
        """Drop all memory; no graph that uses it may be running."""
        self._kept.clear()


class _Kernel(Protocol):
    @property
    def name(self) -> str:
        """Name in options, lists and messages."""
        ...

    def refuses(self, shape: HeadShape, arch: Arch) -> str | None:
        """Return why a GPU cannot run the kernel for heads of `shape`, in words; None if it can."""
        ...


class DecodeKernel(_Kernel, Protocol):
    """Protocol of the declaration of a way to attend in decodes."""

    @property
    def stores(self) -> bool:
        """Whether it also stores the keys and values of its tokens: tokens of one row then cannot see each other."""
        ...

    def most_lines(self, shape: HeadShape, arch: Arch) -> int:
        """Return for how many tokens of each row a step can attend at once, where the kernel does not refuse `shape`.

        With 1, a row of which a step computes several tokens has to be as many rows.
        """
        ...

    def builds(self, shape: HeadShape, lines: int = 1) -> Sequence[Callable[[], object]]:
        """Return the functions that compile the kernel ahead for rows of `lines` lines; none if it is compiled late."""
        ...

    def open(self, shape: HeadShape, inputs: DecodeInputs, room: DecodeRoom, lines: int = 1) -> DecodeStep | WholeStep:
        """Make the kernel ready for the lines of `inputs`, `lines` of which make up a row; imports its compiler."""
        ...


class PrefillKernel(_Kernel, Protocol):
    """Protocol of the declaration of a way to attend in prefills."""

    def builds(self, shape: HeadShape) -> Sequence[Callable[[], object]]:
        """Return the functions that compile the kernel ahead; none if it is compiled late."""
        ...

    def open(self, shape: HeadShape, device: torch.device, *, pdl: bool) -> PrefillAttention:
        """Make the kernel ready."""
        ...


class DecodeChoice(NamedTuple):
    """The ways to attend in decodes, each with the batches for which it is preferred to those after it."""

    ways: tuple[tuple[DecodeKernel, tuple[Span, ...]], ...]
    refused: dict[str, str]
    """Why each other way is not used, in words, by its name."""

    def at(self, rows: int, context: int) -> DecodeKernel:
        """Return the way for a batch of `rows` rows with `context` tokens each on the average."""
        if (kernel := self.find(rows, context)) is None:
            raise LookupError(f"no kernel attends for {rows} rows of {context} tokens")
        return kernel

    def find(self, rows: int, context: int) -> DecodeKernel | None:
        """Return the way for a batch as `at` does; None if there is none.

        For rows of several lines, None says that their lines are to be rows of their own.
        """
        tokens = rows * context
        return next((kernel for kernel, spans in self.ways if any(span.has(rows, tokens) for span in spans)), None)


def resolve_decode(kernels: Sequence[DecodeKernel], shape: HeadShape, arch: Arch, lines: int = 1) -> DecodeChoice:
    """Choose the ways to attend in decodes for heads of `shape` and rows of `lines` lines; the first are preferred."""
    spans = _spans(shape, arch.tuning, lines)
    refused = {each.name: why for each in kernels if (why := each.refuses(shape, arch)) is not None}
    refused |= {
        each.name: f"rows have {lines} lines, the kernel takes {most}"
        for each in kernels
        if each.name not in refused and (most := each.most_lines(shape, arch)) < lines
    }
    refused |= {
        each.name: f"has no numbers of {arch.tuning.chip}"
        for each in kernels
        if each.name not in spans and each.name not in refused
    }
    return DecodeChoice(tuple((each, spans[each.name]) for each in kernels if each.name not in refused), refused)


def _spans(shape: HeadShape, tuning: Tuning, lines: int) -> Mapping[str, tuple[Span, ...]]:
    """Return the batches for which each way pays, the preferred way first, for rows of `lines` lines."""
    if lines == 1:
        return tuning.decode if shape.kv_dtype == shape.dtype else tuning.decode_8_bits
    return tuning.decode_lines if lines * shape.heads <= _TILE * shape.kv_heads else tuning.decode_many_lines


def resolve_prefill(
    kernels: Sequence[PrefillKernel], shape: HeadShape, arch: Arch
) -> tuple[tuple[PrefillKernel, ...], dict[str, str]]:
    """Return (the kernels that can attend in prefills, the preferred first; why each other cannot, by its name)."""
    refused = {each.name: why for each in kernels if (why := each.refuses(shape, arch)) is not None}
    return tuple(each for each in kernels if each.name not in refused), refused
