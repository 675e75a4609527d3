"""`GatedFeed`: the gated feed-forward network of Llama and most decoders after it.

    y = x + norm_r(down(act(gate(n)) * up(n))),   n = norm(x)

A model may lack each of these norms.
Shazeer (2020), "GLU variants improve transformer".
"""

from __future__ import annotations

from typing import Generic

from torch import Tensor

from headrace.engine.model.checkpoint.weights import SublayerWeights
from headrace.engine.model.network.operations import BlockOps, DeviceOps, Kv, Packed, Step
from headrace.engine.model.network.placement import Entry, add_result
from headrace.engine.model.spec import DenseFeed, LayerSpec
from headrace.ops.layer_weights import FeedWeights
from headrace.ops.stream import Stream

__all__ = ["GatedFeed"]


class GatedFeed(Generic[Packed, Step, Kv]):
    """Feed of one layer."""

    def __init__(self, spec: LayerSpec, weights: SublayerWeights, ops: DeviceOps[Packed, Step, Kv], layer: int) -> None:
        """Pack the weights of the layer with the number `layer`."""
        vectors, matrices = weights.vectors, weights.matrices
        self._entry = Entry(vectors, ops)
        self.entry_norm_E: Tensor | None = self._entry.norm_E
        self._result_norm_E = vectors.get("result_norm_E")
        self._gate_up = ops.pack(matrices["gate_up"], vectors.get("gate_up_bias"))
        self._down = ops.pack(matrices["down"], vectors.get("down_bias"))
        assert isinstance(spec.feed, DenseFeed)
        self._activation = spec.feed.activation
        self._device, self._layer = ops, layer

    @property
    def weights(self) -> FeedWeights[Packed] | None:
        """The weights, where the one norm is an RMS norm before the feed, and the activation is SiLU."""
        norm_E = self.entry_norm_E
        if norm_E is None or self._result_norm_E is not None or self._activation != "silu":
            return None
        return FeedWeights(norm_E, self._gate_up, self._down)

    def __call__(self, ops: BlockOps[Packed, Step, Kv], stream: Stream, next_norm_E: Tensor | None) -> Stream:
        """Return the stream with the feed's result added."""
        if self.entry_norm_E is not None and self._activation == "silu":
            x_NF, total_NE = ops.feed(stream, self.entry_norm_E, self._gate_up, self._layer)
        else:
            x_NE, total_NE = self._entry(ops, stream)
            x_NF = self._activated(ops, x_NE)
        norms = self._result_norm_E, next_norm_E
        return add_result(ops, x_NF, self._down, total_NE, norms, self._layer, "down")

    def result(self, ops: BlockOps[Packed, Step, Kv], x_NE: Tensor) -> Tensor:
        """Return down(act(gate(x)) * up(x))."""
        return ops.linear(self._activated(ops, x_NE), self._down, self._layer, "down")

    def _activated(self, ops: BlockOps[Packed, Step, Kv], x_NE: Tensor) -> Tensor:
        gate_up_N2F = ops.linear(x_NE, self._gate_up, self._layer, "gate_up")
        return self._device.activate(gate_up_N2F, self._activation)
