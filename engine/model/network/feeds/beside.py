"""`DenseBesideExperts`: a dense feed and a mixture of experts side by side, each with norms of its own (Gemma 4).

    y = x + norm_r(norm_d(dense(norm(x))) + norm_s(sum over the chosen experts e of s_e w_e expert_e(norm_e(x))))

with w_e of a router that reads x / rms(x) * r / sqrt(E), where r are weights and E is the width of the stream, and with
a factor s_e of each expert. Gemma Team (2026), as transformers computes it (`models/gemma4`).
"""

from __future__ import annotations

from typing import Generic, NoReturn

from torch import Tensor

from headrace.engine.model.checkpoint.weights import SublayerWeights
from headrace.engine.model.experts import ExpertsBesideDense
from headrace.engine.model.network.feeds.experts import experts_of
from headrace.engine.model.network.operations import BlockOps, DeviceOps, Kv, Packed, Step
from headrace.engine.model.network.placement import Entry
from headrace.engine.model.spec import LayerSpec
from headrace.ops.stream import Stream

__all__ = ["DenseBesideExperts"]


class DenseBesideExperts(Generic[Packed, Step, Kv]):
    """Feed of one layer."""

    def __init__(self, spec: LayerSpec, weights: SublayerWeights, ops: DeviceOps[Packed, Step, Kv], layer: int) -> None:
        """Pack the weights of the layer with the number `layer`."""
        assert isinstance(spec.feed, ExpertsBesideDense)
        vectors, matrices = weights.vectors, weights.matrices
        self._entry = Entry(vectors, ops)
        self.entry_norm_E: Tensor | None = self._entry.norm_E
        names = ("dense_result_norm_E", "experts_norm_E", "experts_result_norm_E", "result_norm_E")
        self._norms = tuple(vectors[name] for name in names)
        self._router_norm_E = vectors["router_norm_E"] * len(vectors["router_norm_E"]) ** -0.5
        self._gate_up = ops.pack(matrices["gate_up"], vectors.get("gate_up_bias"))
        self._down = ops.pack(matrices["down"], vectors.get("down_bias"))
        self._experts = ops.pack_experts(experts_of(spec.feed, weights))
        self._activation, self._device, self._layer = spec.feed.dense.activation, ops, layer

    def __call__(self, ops: BlockOps[Packed, Step, Kv], stream: Stream, next_norm_E: Tensor | None) -> Stream:
        """Return the stream with the feed's result added."""
        dense_norm_E, entry_norm_E, experts_norm_E, result_norm_E = self._norms
        x_NE, total_NE = self._entry(ops, stream)
        x_NF = self._device.activate(ops.linear(x_NE, self._gate_up, self._layer, "gate_up"), self._activation)
        dense_NE = ops.normed(Stream(ops.linear(x_NF, self._down, self._layer, "down")), dense_norm_E)[0]
        routed_NE, _ = ops.normed(Stream(total_NE), self._router_norm_E)
        y_NE = self._experts(ops.normed(Stream(total_NE), entry_norm_E)[0], routed_NE)
        both_NE = dense_NE + ops.normed(Stream(y_NE), experts_norm_E)[0]
        return Stream(ops.normed(Stream(both_NE), result_norm_E)[0], total_NE)

    def result(self, ops: BlockOps[Packed, Step, Kv], x_NE: Tensor) -> NoReturn:
        """Raise `NotImplementedError`: experts and router read the stream, not a norm that mixer and feed share."""
        raise NotImplementedError("experts beside a dense feed do not stand beside a mixer, too")
