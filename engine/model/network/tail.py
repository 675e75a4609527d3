"""`Tail`: what a layer does to the residual stream behind its feed (Gemma 4).

    x' = s * (x + norm(W_p (act(W_g x) * e)))

with a factor s, and an embedding e of the token that is the layer's own; without one, x' = s * x.
"""

from __future__ import annotations

from typing import Generic

from torch import Tensor

from headrace.engine.model.checkpoint.weights import SublayerWeights
from headrace.engine.model.network.operations import BlockOps, DeviceOps, Kv, Packed, Step
from headrace.engine.model.tail import LayerTail
from headrace.ops.stream import Stream

__all__ = ["Tail"]


class Tail(Generic[Packed, Step, Kv]):
    """The end of one layer."""

    def __init__(self, spec: LayerTail, weights: SublayerWeights, ops: DeviceOps[Packed, Step, Kv], layer: int) -> None:
        """Pack the weights, which are among those of the feed of the layer with the number `layer`."""
        self._factor = float(weights.vectors["factor_1"])
        self._device, self._layer, self._activation = ops, layer, spec.activation
        self._own: tuple[Packed, Packed, Tensor] | None = None
        if spec.size is not None:
            gate, result = (ops.pack(weights.matrices[name], None) for name in ("own_gate", "own_result"))
            self._own = gate, result, weights.vectors["own_norm_E"]

    def __call__(self, ops: BlockOps[Packed, Step, Kv], stream: Stream, own_NP: Tensor | None) -> Stream:
        """Return the stream behind the layer.

        Args:
            ops: The operations of this step.
            stream: The residual stream behind the feed.
            own_NP: The layer's own embeddings of the step's tokens; None for a model without.
        """
        x_NE, total_NE = ops.summed(stream)
        if self._own is not None and own_NP is not None:
            gate, result, norm_E = self._own
            gate_NP = self._device.activate_plain(ops.linear(x_NE, gate, self._layer, "own_gate"), self._activation)
            y_NE = ops.linear(gate_NP * own_NP, result, self._layer, "own_result")
            total_NE = total_NE + ops.normed(Stream(y_NE), norm_E)[0]
        return Stream(total_NE * self._factor)
