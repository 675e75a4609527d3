"""`UngatedFeed`: the feed-forward network without a gate of the first Transformer, GPT-2 and their successors.

    y = x + W_down act(W_up n + b_up) + b_down,   n = norm(x)

Vaswani et al. (2017), "Attention is all you need"; Hendrycks and Gimpel (2016) for GELU.
"""

from __future__ import annotations

from typing import Generic

from torch import Tensor

from headrace.engine.model.checkpoint.weights import SublayerWeights
from headrace.engine.model.network.operations import BlockOps, DeviceOps, Kv, Packed, Step
from headrace.engine.model.network.placement import Entry, add_result
from headrace.engine.model.spec import LayerSpec, PlainFeed
from headrace.ops.stream import Stream

__all__ = ["UngatedFeed"]


class UngatedFeed(Generic[Packed, Step, Kv]):
    """Feed of one layer."""

    def __init__(self, spec: LayerSpec, weights: SublayerWeights, ops: DeviceOps[Packed, Step, Kv], layer: int) -> None:
        """Pack the weights of the layer with the number `layer`."""
        vectors, matrices = weights.vectors, weights.matrices
        self._entry = Entry(vectors, ops)
        self.entry_norm_E: Tensor | None = self._entry.norm_E
        self._result_norm_E = vectors.get("result_norm_E")
        self._up = ops.pack(matrices["up"], vectors.get("up_bias"))
        self._down = ops.pack(matrices["down"], vectors.get("down_bias"))
        assert isinstance(spec.feed, PlainFeed)
        self._activation = spec.feed.activation
        self._device, self._layer = ops, layer

    def __call__(self, ops: BlockOps[Packed, Step, Kv], stream: Stream, next_norm_E: Tensor | None) -> Stream:
        """Return the stream with the feed's result added."""
        x_NE, total_NE = self._entry(ops, stream)
        norms = self._result_norm_E, next_norm_E
        return add_result(ops, self._activated(ops, x_NE), self._down, total_NE, norms, self._layer, "down")

    def result(self, ops: BlockOps[Packed, Step, Kv], x_NE: Tensor) -> Tensor:
        """Return down(act(up(x)))."""
        return ops.linear(self._activated(ops, x_NE), self._down, self._layer, "down")

    def _activated(self, ops: BlockOps[Packed, Step, Kv], x_NE: Tensor) -> Tensor:
        up_NF = ops.linear(x_NE, self._up, self._layer, "gate_up")
        return self._device.activate_plain(up_NF, self._activation)
