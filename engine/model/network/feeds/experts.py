"""`RoutedFeed`: a mixture of experts, with a shared expert or without.

    y = x + norm_r(sum over the chosen experts e of w_e * down_e(act(gate_e(n)) * up_e(n)) + shared(n)),   n = norm(x)

A model may lack each of these norms, and the shared expert. The device's operations choose the experts and sum their
results (ops/experts.py).
"""

from __future__ import annotations

from typing import Generic

import torch
from torch import Tensor

from headrace.engine.model.checkpoint.weights import SublayerWeights
from headrace.engine.model.experts import ROUTER, ExpertsFeed, SharedExpert, down_of, gate_up_of
from headrace.engine.model.network.operations import BlockOps, DeviceOps, Kv, Packed, Step
from headrace.engine.model.network.placement import Entry
from headrace.engine.model.spec import LayerSpec
from headrace.ops.experts import Experts, sigmoid
from headrace.ops.stream import Stream

__all__ = ["RoutedFeed", "experts_of"]


class RoutedFeed(Generic[Packed, Step, Kv]):
    """Feed of one layer."""

    def __init__(self, spec: LayerSpec, weights: SublayerWeights, ops: DeviceOps[Packed, Step, Kv], layer: int) -> None:
        """Pack the weights of the layer with the number `layer`."""
        assert isinstance(spec.feed, ExpertsFeed)
        self._entry = Entry(weights.vectors, ops)
        self.entry_norm_E: Tensor | None = self._entry.norm_E
        self._result_norm_E = weights.vectors.get("result_norm_E")
        self._experts = ops.pack_experts(experts_of(spec.feed, weights))
        shared = spec.feed.shared
        self._shared = None if shared is None else _SharedFeed(shared, weights, ops, layer)

    def __call__(self, ops: BlockOps[Packed, Step, Kv], stream: Stream, next_norm_E: Tensor | None) -> Stream:
        """Return the stream with the feed's result added."""
        x_NE, total_NE = self._entry(ops, stream)
        y_NE = self.result(ops, x_NE)
        if self._result_norm_E is not None:
            y_NE = ops.normed(Stream(y_NE), self._result_norm_E)[0]
        return Stream(y_NE, total_NE)

    def result(self, ops: BlockOps[Packed, Step, Kv], x_NE: Tensor) -> Tensor:
        """Return what the feed makes of a normed input, [N, E]."""
        y_NE = self._experts(x_NE)
        return y_NE if self._shared is None else y_NE + self._shared(ops, x_NE)


class _SharedFeed(Generic[Packed, Step, Kv]):
    """The expert that computes every token."""

    def __init__(
        self, shared: SharedExpert, weights: SublayerWeights, ops: DeviceOps[Packed, Step, Kv], layer: int
    ) -> None:
        self._gate_up = ops.pack(weights.matrices["shared_gate_up"], None)
        self._down = ops.pack(weights.matrices["shared_down"], None)
        self._switch_1E = weights.vectors["shared_switch_1E"].view(1, -1) if shared.gated else None
        self._device, self._layer, self._activation = ops, layer, shared.activation

    def __call__(self, ops: BlockOps[Packed, Step, Kv], x_NE: Tensor) -> Tensor:
        gate_up_N2F = ops.linear(x_NE, self._gate_up, self._layer, "gate_up")
        x_NF = self._device.activate(gate_up_N2F, self._activation)
        y_NE = ops.linear(x_NF, self._down, self._layer, "down")
        if self._switch_1E is None:
            return y_NE
        share_N1 = sigmoid((x_NE.float() * self._switch_1E).sum(1, keepdim=True))
        return (y_NE * share_N1).to(y_NE.dtype)


def experts_of(feed: ExpertsFeed, weights: SublayerWeights) -> Experts:
    """Return a layer's router and experts as they are stored."""
    every, vectors, biases = range(feed.routing.experts), weights.vectors, dict[str, Tensor]()
    if feed.biased:
        if feed.has_biases_apart:
            apart = vectors["gate_proj_bias"], vectors["up_proj_bias"]
        else:
            apart = vectors["gate_up_proj_bias"][:, ::2], vectors["gate_up_proj_bias"][:, 1::2]
        biases["router_bias_X"], biases["down_bias_XE"] = vectors["router_bias_X"], vectors["down_proj_bias"]
        biases["gate_up_bias_XF"] = torch.cat(apart, 1)
    return Experts(
        feed.routing,
        weights.vectors[ROUTER],
        tuple(weights.matrices[gate_up_of(expert)] for expert in every),
        tuple(weights.matrices[down_of(expert)] for expert in every),
        feed.activation,
        correction_X=vectors["correction"].flatten() if feed.correction_dims else None,
        scales_X=vectors.get("expert_scales_X"),
        **biases,
    )
