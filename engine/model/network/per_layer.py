"""`PerLayerInputs`: the embeddings of a step's tokens that each layer has for itself (Gemma 4's small models).

    e = (norm(W x / sqrt(E)) + c t) / sqrt(2)

for each layer, where x is the model's embedding of a token, scaled, of E elements, and t the layer's part of the
token's row in a table of its own.
"""

from __future__ import annotations

import math
from typing import Generic

from torch import Tensor

from headrace.engine.model.checkpoint.weights import PerLayerWeights
from headrace.engine.model.network.operations import BlockOps, DeviceOps, Kv, Packed, Step, Table
from headrace.engine.model.tail import PerLayerEmbedding
from headrace.ops.stream import Stream

__all__ = ["PerLayerInputs"]


class PerLayerInputs(Generic[Packed, Step, Kv]):
    """The table, and the product that is blended with its rows."""

    def __init__(
        self, spec: PerLayerEmbedding, weights: PerLayerWeights, table: Table, ops: DeviceOps[Packed, Step, Kv]
    ) -> None:
        """Pack the weights; `table` hands out the rows of `weights.table_VX`."""
        self._spec, self._table = spec, table
        self._product, self._norm_P = ops.pack(weights.product_XE, None), weights.norm_P

    def __call__(self, ops: BlockOps[Packed, Step, Kv], tokens_N: Tensor, x_NE: Tensor) -> Tensor:
        """Return the embeddings of all layers, [N, layers, P].

        Args:
            ops: The operations of this step.
            tokens_N: Token ids, int32 or int64.
            x_NE: The model's embeddings of these tokens, scaled; they are left as they are.
        """
        y_NX = ops.linear(x_NE, self._product, -1, "per_layer") * x_NE.shape[1] ** -0.5
        normed_RP, _ = ops.normed(Stream(y_NX.view(-1, self._spec.size)), self._norm_P)
        of_tokens_NX = self._table[tokens_N] * self._spec.scale
        blended_RP = (normed_RP + of_tokens_NX.view(normed_RP.shape)) * math.sqrt(0.5)
        return blended_RP.view(len(tokens_N), -1, self._spec.size)
