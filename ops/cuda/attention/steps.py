"""The steps of attention on CUDA, and the protocols of what attends in them; knows no kernel.

Shape letters as in `ops/paged.py`, B rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, NamedTuple, Protocol, TypeAlias

from headrace.ops.cuda.hazards import Launch
from headrace.ops.paged import UNSCALED, KvScales

if TYPE_CHECKING:
    from torch import Tensor

    from headrace.ops.cuda.fused import DecodeInputs

__all__ = [
    "ATTENTION", "CudaKv", "CudaStep", "DecodeAttention", "DecodeStep", "GivenRows", "PlannedAttention",
    "PrefillAttention", "PrefillStep", "WholeAttention", "WholeStep",
]  # fmt: skip

ATTENTION: Final = Launch("attention", overlaps=False, writes=frozenset(("activations",)))


class DecodeAttention(Protocol):
    """Protocol of attention in decodes, over pages that already hold the step's tokens.

    Everything has a line for each token that the step computes. A row has one of them, or as many as the kernel was
    opened for, which are adjacent: first those of consecutive tokens, at least one, and then those that compute nothing
    of use. The latter have a length no greater than the first line's, and attend to what that line attends to.
    """

    def deal(self, inputs: DecodeInputs) -> None:
        """Enqueue what all layers of a step share; a graph can capture it."""
        ...

    def run(
        self,
        q_BHD: Tensor,
        kv_layer: Tensor,
        inputs: DecodeInputs,
        out_BHD: Tensor,
        scales: KvScales = UNSCALED,
        sinks_H: Tensor | None = None,
    ) -> None:
        """Enqueue one layer; a graph can capture it. `kv_layer` is `[pages, 2, T, K, D]`; q and out are contiguous.

        `sinks_H` has the layer's sinks, float32, if the shape of its heads says that there are some.
        """
        ...


class PlannedAttention(DecodeAttention, Protocol):
    """Protocol of attention in decodes that the host plans before a graph replays."""

    def plan(self, seq_lens: Sequence[int]) -> None:
        """Prepare the next launch on the current stream, outside any graph, for lengths no less than the real ones."""
        ...


class WholeAttention(Protocol):
    """Protocol of attention in decodes that also norms and rotates heads, and stores keys and values."""

    def run(
        self,
        qkv_BX: Tensor,
        q_norm_D: Tensor | None,
        k_norm_D: Tensor | None,
        cos_sin_PD: Tensor,
        kv_layer: Tensor,
        inputs: DecodeInputs,
        out_BX: Tensor,
        scales: KvScales = UNSCALED,
        sinks_H: Tensor | None = None,
        *,
        eps: float,
        pdl: bool = False,
    ) -> None:
        """Enqueue one layer; a graph can capture it."""
        ...


class PrefillAttention(Protocol):
    """Protocol of attention in prefills, causal, over pages that already hold the new tokens."""

    def plan(self, counts: Sequence[int], lengths: Sequence[int], pages: Sequence[Sequence[int]]) -> None:
        """Plan a step on the current stream.

        Args:
            counts: New tokens of each row; queries are packed in this order.
            lengths: Context length of each row, the new tokens included.
            pages: Page numbers of each row, at least as many as its length needs.
        """
        ...

    def run(
        self,
        q_NHD: Tensor,
        kv_layer: Tensor,
        out_NHD: Tensor,
        scales: KvScales = UNSCALED,
        sinks_H: Tensor | None = None,
    ) -> None:
        """Enqueue one layer; `q_NHD` may be a view into packed q, k and v."""
        ...


@dataclass(frozen=True, slots=True, eq=False)
class DecodeStep:
    """Decode step: one token for each row; the device reads everything when a graph replays."""

    inputs: DecodeInputs
    attention: DecodeAttention
    launch: Launch = ATTENTION
    """What a layer's attention does to memory."""
    deal: Launch | None = None
    """What `attention.deal` does to memory; None if nothing."""
    planned: PlannedAttention | None = None
    """`attention`, if the host plans it."""


@dataclass(frozen=True, slots=True, eq=False)
class WholeStep:
    """Decode step whose attention also norms and rotates heads, and stores keys and values."""

    inputs: DecodeInputs
    attention: WholeAttention
    launch: Launch = ATTENTION
    """What a layer's attention does to memory."""


@dataclass(frozen=True, slots=True, eq=False)
class PrefillStep:
    """Prefill step: several tokens for each row, with a plan for attention."""

    positions_N: Tensor
    slots_N: Tensor
    attention: PrefillAttention
    given: tuple[GivenRows, ...] = ()


class GivenRows(NamedTuple):
    """Virtual tokens whose keys and values are given, not computed (prefix tuning, Li and Liang, 2021)."""

    first: int
    """Index of the first of these among the step's tokens."""
    kv_LMX: Tensor
    """Keys, already rotated, then values of each layer: [layers, M, 2 * K * D]."""


CudaStep: TypeAlias = DecodeStep | WholeStep | PrefillStep
CudaKv: TypeAlias = "Sequence[Tensor]"
"""The paged cache: pages of each layer, `[pages, ...]`."""
