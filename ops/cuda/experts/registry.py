"""The protocol of the kernels that compute experts on CUDA, and the choice between them, made once for each layer.

Needs no GPU and imports no compiler: a choice can be made, and explained, for any GPU by its name. The kernels
themselves are declared in kernels.py.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, Protocol

import torch

from headrace.ops.cuda.hazards import Launch, Thing
from headrace.ops.cuda.products.registry import ByRows, spans_of

if TYPE_CHECKING:
    from torch import Tensor

    from headrace.ops.cuda.arch import Arch
    from headrace.ops.cuda.codes.kinds import Kind
    from headrace.ops.cuda.experts.arena import Arena
    from headrace.ops.cuda.products.registry import ProductRoom
    from headrace.ops.routing import ExpertActivation, Routing

__all__ = [
    "ExpertKernel", "ExpertRun", "ExpertShape", "ExpertWeights", "Padding", "ResolvedExperts", "launches",
    "resolve_experts", "split_router",
]  # fmt: skip


class ExpertShape(NamedTuple):
    """The properties of a layer's experts that decide which kernels can compute them."""

    routing: Routing
    hidden: int
    """Features of the stream."""
    size: int
    """Gates of an expert."""
    dtype: torch.dtype = torch.bfloat16
    """Dtype of activations, and of weights that are not quantised."""
    gate_up: Kind | None = None
    """Kind of the codes of gates and ups; None for dense weights."""
    down: Kind | None = None


class ExpertWeights(NamedTuple):
    """A layer's router and experts as kernels read them."""

    routing: Routing
    router_3XE: Tensor
    """Weight of the router in three parts, whose sum it is, bf16, contiguous (`split_router`)."""
    router_bias_X: Tensor | None
    correction_X: Tensor | None
    gate_up: Arena
    down: Arena
    activation: ExpertActivation
    gate_up_bias_XL: Tensor | None
    """Biases of gates, then of ups, float32 [X, 2F], contiguous."""
    down_bias_XE: Tensor | None
    scales_X: Tensor | None = None
    """Factors of the weights of each expert's results, float32."""

    @property
    def router_XE(self) -> Tensor:
        """Weight of the router, float32."""
        return self.router_3XE.float().sum(0)


class Padding(NamedTuple):
    """Tokens of a step that are padding."""

    rows_N: Tensor
    """Row of each token, int32."""
    row: int
    """The row whose tokens are padding."""


class ExpertRun(Protocol):
    """Protocol of a kernel that is ready to run on one stream."""

    def run(
        self, x_NE: Tensor, routed_NE: Tensor, weights: ExpertWeights, out_NE: Tensor, padding: Padding | None
    ) -> None:
        """Enqueue the sum of the results of each token's experts, times their weights.

        Args:
            x_NE: Normed input, contiguous.
            routed_NE: Input of the router, contiguous, which may be `x_NE`.
            weights: Weights of a layer whose shape the kernel does not refuse.
            out_NE: Output, contiguous; must not overlap the input.
            padding: Tokens that are given no experts, and whose results do not matter; None where there are none.
        """
        ...


class ExpertKernel(Protocol):
    """Protocol of a kernel's declaration: what it refuses, where it pays, and how it is made ready."""

    @property
    def name(self) -> str:
        """Name in lists and messages."""
        ...

    def refuses(self, arch: Arch, shape: ExpertShape) -> str | None:
        """Return why the kernel cannot compute such experts on a GPU, in words; None if it can."""
        ...

    def rows(self, arch: Arch, shape: ExpertShape) -> range:
        """Return the numbers of tokens for which the kernel pays, by the GPU's tuning."""
        ...

    def builds(self, arch: Arch, kinds: Sequence[Kind]) -> Sequence[Callable[[], object]]:
        """Return the functions that compile the kernel ahead for experts in codes of `kinds`; none for Triton's."""
        ...

    def open(self, room: ProductRoom) -> ExpertRun:
        """Make the kernel ready to run on one stream; imports its compiler."""
        ...


@dataclass(frozen=True, slots=True)
class ResolvedExperts:
    """The kernel for each number of tokens, for one shape."""

    kernels: ByRows[ExpertKernel]
    refused: Mapping[str, str]
    """Why each kernel is not used, in words, by its name."""


def launches(*, pdl: bool) -> tuple[Launch, Launch]:
    """Return what the router's launch does to memory, which reads its weight early, and what the others do."""
    activations: frozenset[Thing] = frozenset(("activations",))
    return Launch("the router", pdl, frozenset(("weights",)), activations), Launch("experts", pdl, writes=activations)


def resolve_experts(kernels: Sequence[ExpertKernel], arch: Arch, shape: ExpertShape) -> ResolvedExperts:
    """Choose the first of `kernels` that does not refuse and that pays, by ranges of tokens."""
    why = {each.name: reason for each in kernels if (reason := each.refuses(arch, shape)) is not None}
    able = [(each.rows(arch, shape), each) for each in kernels if each.name not in why]
    return ResolvedExperts(ByRows(spans_of(able)), why)


def split_router(router_XE: Tensor) -> Tensor:
    """Return three bfloat16 numbers for each of a router's weights, [3, X, E], whose sum is the weight."""
    parts, rest_XE = [], router_XE.float()
    for _ in range(3):
        parts.append(rest_XE.bfloat16())
        rest_XE = rest_XE - parts[-1].float()
    return torch.stack(parts)
