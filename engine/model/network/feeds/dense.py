"""`GatedFeed`: the gated feed-forward network of Llama and most decoders after it, behind an RMS norm.

    y = x + down(silu(gate(n)) * up(n)),   n = norm(x)

Shazeer (2020), "GLU variants improve transformer".
"""

from __future__ import annotations

from typing import Generic

from torch import Tensor

from headrace.engine.model.checkpoint.weights import SublayerWeights
from headrace.engine.model.network.operations import BlockOps, DeviceOps, Kv, Packed, Step
from headrace.engine.model.network.placement import check_pre_norms
from headrace.engine.model.spec import LayerSpec
from headrace.ops.stream import Stream

__all__ = ["GatedFeed"]


class GatedFeed(Generic[Packed, Step, Kv]):
    """Feed of one layer."""

    def __init__(self, spec: LayerSpec, weights: SublayerWeights, ops: DeviceOps[Packed, Step, Kv], layer: int) -> None:
        """Pack the weights of the layer with the number `layer`.

        Raises:
            ModelRejected: The norm is placed elsewhere than before the products.
        """
        check_pre_norms(spec)
        vectors, matrices = weights.vectors, weights.matrices
        self.entry_norm_E: Tensor | None = vectors["norm_E"]
        self._norm_E = vectors["norm_E"]
        self._gate_up = ops.pack(matrices["gate_up"], vectors.get("gate_up_bias"))
        self._down = ops.pack(matrices["down"], vectors.get("down_bias"))
        self._layer = layer

    def __call__(self, ops: BlockOps[Packed, Step, Kv], stream: Stream, next_norm_E: Tensor | None) -> Stream:
        """Return the stream with the feed's result added."""
        x_NF, total_NE = ops.feed(stream, self._norm_E, self._gate_up, self._layer)
        return ops.add(x_NF, self._down, total_NE, next_norm_E, self._layer, "down")
