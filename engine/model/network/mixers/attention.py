"""`SoftmaxAttention`: grouped softmax attention with rotated heads, behind an RMS norm.

    x' = x + W_o softmax(q k^T / sqrt(D)) v
    q, k, v = rope(norm_h(W_q n)), rope(norm_h(W_k n)), W_v n,   n = norm(x)

Vaswani et al. (2017), Su et al. (2021) for rope, Ainslie et al. (2023) for key heads shared by groups, Henry et al.
(2020) for norms of heads, Jiang et al. (2023) for windows. Scores and their softmax are the device's.
"""

from __future__ import annotations

from typing import Generic

from torch import Tensor

from headrace.engine.model.checkpoint.weights import SublayerWeights
from headrace.engine.model.network.operations import BlockOps, DeviceOps, Kv, Packed, Step
from headrace.engine.model.network.placement import check_pre_norms
from headrace.engine.model.spec import LayerSpec
from headrace.ops.stream import HeadNorms, Stream

__all__ = ["SoftmaxAttention"]


class SoftmaxAttention(Generic[Packed, Step, Kv]):
    """Attention of one layer. Its state is the keys and values of the layer's pages."""

    def __init__(self, spec: LayerSpec, weights: SublayerWeights, ops: DeviceOps[Packed, Step, Kv], layer: int) -> None:
        """Pack the weights of the layer with the number `layer`.

        Raises:
            ModelRejected: The norm is placed elsewhere than before the products.
        """
        check_pre_norms(spec)
        vectors, matrices = weights.vectors, weights.matrices
        self.entry_norm_E: Tensor | None = vectors["norm_E"]
        self._norm_E = vectors["norm_E"]
        self._qkv = ops.pack(matrices["qkv"], vectors.get("qkv_bias"))
        self._o = ops.pack(matrices["o"], vectors.get("o_bias"))
        self._head_norms = HeadNorms(vectors["q_norm_D"], vectors["k_norm_D"]) if "q_norm_D" in vectors else None
        self._layer = layer

    def __call__(
        self, ops: BlockOps[Packed, Step, Kv], stream: Stream, next_norm_E: Tensor | None, step: Step, kv: Kv
    ) -> Stream:
        """Return the stream with the attention's result added."""
        x_NX, total_NE = ops.attend(stream, self._norm_E, self._qkv, self._head_norms, step, kv, self._layer)
        return ops.add(x_NX, self._o, total_NE, next_norm_E, self._layer, "o")
