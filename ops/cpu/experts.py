"""`CpuExperts`: a layer's experts on the CPU by any product kernels; also the order in which rows are grouped.

Rows are gathered by expert, so that the weights of each expert that is hit are read once, and those of others never.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from torch.nn import functional

from headrace.ops.cpu.activation import activate
from headrace.ops.cpu.linear import ALIKE_ROWS
from headrace.ops.cpu.products import pack_product
from headrace.ops.experts import CLAMP, SLOPE, route, sigmoid
from headrace.ops.formats import Stored

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray
    from torch import Tensor

    from headrace.ops.cpu.linear import CpuLinear
    from headrace.ops.cpu.products import CpuKernel
    from headrace.ops.experts import ExpertActivation, Experts

__all__ = ["CpuExperts", "Groups", "activate_expert", "grouped", "pack_each", "pack_router"]


class Groups(NamedTuple):
    """Pairs of a token and an expert that computes it, in the order of the experts, then of the tokens."""

    starts_X1: NDArray[np.int32]
    """First pair of each expert, and the number of all pairs."""
    tokens_P: NDArray[np.int64]
    """Token of each pair."""
    places_NK: NDArray[np.int64]
    """Pair of each token's experts, in the order of its choice."""


def grouped(ids_NK: Tensor, experts: int) -> Groups:
    """Return the pairs of tokens and their experts, grouped by expert."""
    ids_P = ids_NK.numpy().reshape(-1)
    order_P = np.argsort(ids_P, kind="stable")
    starts_X1 = np.zeros(experts + 1, np.int32)
    np.cumsum(np.bincount(ids_P, minlength=experts), out=starts_X1[1:])
    places_P = np.empty_like(order_P)
    places_P[order_P] = np.arange(len(order_P))
    return Groups(starts_X1, order_P // max(ids_NK.shape[1], 1), places_P.reshape(ids_NK.shape))


def activate_expert(gate_up_P2F: Tensor, activation: ExpertActivation) -> Tensor:
    """Return the activation of experts, [P, F], where the input holds gate, then up."""
    if activation != "clamped_swiglu":
        return activate(gate_up_P2F, activation)
    gate_PF, up_PF = gate_up_P2F.chunk(2, -1)
    gate_PF = gate_PF.clamp(max=CLAMP)
    return up_PF.clamp(-CLAMP, CLAMP).add_(1.0).mul_(gate_PF).mul_(sigmoid(gate_PF * SLOPE))


def pack_each(
    pack: Callable[[Stored, Tensor | None], CpuLinear], weights: tuple[Stored, ...], biases: Tensor | None
) -> list[CpuLinear]:
    """Return the product of each expert's weight, with its row of `biases`, if any."""
    rows = [None] * len(weights) if biases is None else biases.unbind()
    return [pack(weight, bias) for weight, bias in zip(weights, rows, strict=True)]


def pack_router(experts: Experts, products: Sequence[CpuKernel]) -> CpuLinear:
    """Return the product of the router, in float32."""
    weight = Stored.from_dense(experts.router_XE)
    return pack_product(weight, experts.router_bias_X, dtype=torch.float32, products=products)


class CpuExperts:
    """A layer's router and experts, one expert after the other."""

    def __init__(
        self,
        experts: Experts,
        pack: Callable[[Stored, Tensor | None], CpuLinear],
        products: Sequence[CpuKernel],
    ) -> None:
        """Pack all weights, those of the router for the kernels `products` in float32."""
        self._routing, self._activation = experts.routing, experts.activation
        self._correction_X, self._scales_X = experts.correction_X, experts.scales_X
        self._router = pack_router(experts, products)
        self._gate_up = pack_each(pack, experts.gate_up, experts.gate_up_bias_XF)
        self._down = pack_each(pack, experts.down, experts.down_bias_XE)

    def __call__(self, x_NE: Tensor, routed_NE: Tensor | None = None) -> Tensor:
        """Return the weighted sum of the results of each token's experts, in the dtype of `x_NE`."""
        logits_NX = self._router((x_NE if routed_NE is None else routed_NE).float())
        choice = route(logits_NX, self._routing, self._correction_X, self._scales_X)
        groups = grouped(choice.ids_NK, self._routing.experts)
        tokens_P, starts = torch.from_numpy(groups.tokens_P), groups.starts_X1.tolist()
        y_PE = torch.empty(len(tokens_P), x_NE.shape[1])
        # As in a step that a runner has padded, so that the end of a prompt has the same bits behind a cached prefix.
        least = ALIKE_ROWS if x_NE.dtype is torch.bfloat16 and len(x_NE) >= ALIKE_ROWS else 0
        for expert, (first, stop) in enumerate(zip(starts, starts[1:], strict=False)):
            if first < stop:
                x_PE = functional.pad(x_NE[tokens_P[first:stop]], (0, 0, 0, max(least - (stop - first), 0)))
                x_PF = activate_expert(self._gate_up[expert](x_PE), self._activation)
                y_PE[first:stop] = self._down[expert](x_PF)[: stop - first]
        places_NK = torch.from_numpy(groups.places_NK)
        sum_NE = torch.zeros(x_NE.shape)
        for places_N, weights_N in zip(places_NK.unbind(1), choice.weights_NK.unbind(1), strict=True):
            sum_NE += weights_N[:, None] * y_PE[places_N]
        return sum_NE.to(x_NE.dtype)
