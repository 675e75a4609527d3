"""`CpuStep`: the values that all layers of one step share on the CPU.

`TorchStep` is that of `CpuOps`, `NativeStep` that of `NativeOps`; each is made and read there alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

    from headrace.ops.cpu.native.library import StepStruct
    from headrace.ops.paged import GivenKv

__all__ = ["CpuStep", "DecodePiece", "NativeStep", "PrefillPiece", "TorchStep"]


@dataclass(frozen=True, slots=True, eq=False)
class DecodePiece:
    """Rows of one token each whose attention is one batched product. B is R * K; S counts gathered tokens of a row.

    Rows may be added behind those of the step; their results are dropped.
    """

    start: int
    stop: int
    rows: int
    """Number of rows R, including those added."""
    gather: Tensor
    buffer: Tensor
    keys_BSD: Tensor
    values_BSD: Tensor
    bias_R11S: Tensor | None
    """Mask of 0 or -inf; None for a single short row, whose keys and values are exactly those that it attends to."""


@dataclass(frozen=True, slots=True, eq=False)
class PrefillPiece:
    """Some queries of a prefill row, and the keys that they may attend to. C is their number with padding."""

    start: int
    stop: int
    gather: Tensor
    buffer: Tensor
    keys_KSD: Tensor
    values_KSD: Tensor
    bias_CS: Tensor


@dataclass(frozen=True, slots=True, eq=False)
class CpuStep:
    """The values that all layers of one step share. Only what made them looks inside."""

    tokens: int
    """Number of the step's tokens."""
    positions_N: Tensor
    """Position of each token, int64."""


@dataclass(frozen=True, slots=True, eq=False)
class TorchStep(CpuStep):
    """The step of torch's operations."""

    cos_N1D: Tensor
    sin_N1D: Tensor
    write: Tensor
    pieces: tuple[DecodePiece | PrefillPiece, ...]
    given: tuple[GivenKv, ...]


@dataclass(frozen=True, slots=True, eq=False)
class NativeStep(CpuStep):
    """The step of the kernels in C."""

    struct: StepStruct
    """The step as the C interface takes it."""
    kept: tuple[object, ...]
    """The arrays that `struct` points into."""
