"""`AttentionToLatents`: multi-head latent attention, with the products of its keys and values taken out of the sum.

DeepSeek-AI (2024), "DeepSeek-V2", section 2.1, whose letters these are. A token h has a latent vector c and the rotated
part k_R of its key, which all heads share; they alone are kept:

    c = norm(W_DKV h),   k_R = rope(W_KR h)                                   equations 9 and 15
    q = W_UQ norm(W_DQ h), or W_Q h;   q_C, q_R = q's plain part, rope(q's other part)    12, 13 and 14
    o = sum over tokens j of softmax_j(s (q_C^T W_UK c_j + q_R^T k_R,j)) W_UV c_j         10, 11, 16 and 17
    x' = x + norm_r(W_O [o_1; ...; o_H]),   h = norm(x)                       18

No key or value need be made. The product with W_UK may go to the query's side, and that with W_UV behind the sum, as
the paper says under equation 11. Every head then attends to the same vectors [c; k_R] with a query [W_UK^T q_C; q_R],
and sums the same c: how is the device's affair. A checkpoint holds W_UK and W_UV of a head one above the other in
`kv_b_proj`, and W_DKV above W_KR.
"""

from __future__ import annotations

from typing import Generic

from torch import Tensor

from headrace.engine.model.checkpoint.weights import SublayerWeights
from headrace.engine.model.latent import LatentAttention
from headrace.engine.model.network.operations import BlockOps, DeviceOps, Kv, Packed, Step
from headrace.engine.model.network.placement import Entry, add_result
from headrace.engine.model.spec import LayerSpec
from headrace.ops.latents import LatentWeights
from headrace.ops.stream import Stream

__all__ = ["AttentionToLatents"]


class AttentionToLatents(Generic[Packed, Step, Kv]):
    """Attention of one layer. Its state is a latent vector and a rotated key of each token in the layer's pages."""

    def __init__(self, spec: LayerSpec, weights: SublayerWeights, ops: DeviceOps[Packed, Step, Kv], layer: int) -> None:
        """Pack the weights of the layer with the number `layer`, those of keys and values head by head."""
        assert isinstance(spec.mixer, LatentAttention)
        vectors, matrices, self._spec = weights.vectors, weights.matrices, spec.mixer
        self._entry = Entry(vectors, ops)
        self.entry_norm_E: Tensor | None = self._entry.norm_E
        self._result_norm_E = vectors.get("result_norm_E")
        has_query_latents = spec.mixer.query_latent_dim is not None
        self._q_a = ops.pack(matrices["q_a"], vectors.get("q_a_bias")) if has_query_latents else None
        self._q_a_norm = vectors.get("q_a_norm")
        self._q = ops.pack(matrices["q_b" if has_query_latents else "q"], None)
        self._kv_a = ops.pack(matrices["kv_a"], vectors.get("kv_a_bias"))
        latents = LatentWeights(
            matrices["kv_b"], spec.mixer.heads, spec.mixer.plain_dim, vectors["kv_a_norm"], spec.mixer.latent_epsilon
        )
        self._attention = ops.pack_latents(latents, layer)
        self._o = ops.pack(matrices["o"], vectors.get("o_bias"))
        self._device, self._layer = ops, layer

    def __call__(
        self, ops: BlockOps[Packed, Step, Kv], stream: Stream, next_norm_E: Tensor | None, step: Step, kv: Kv
    ) -> Stream:
        """Return the stream with the attention's result added."""
        x_NE, total_NE = self._entry(ops, stream)
        norms = self._result_norm_E, next_norm_E
        return add_result(ops, self._attend(ops, x_NE, step, kv), self._o, total_NE, norms, self._layer, "o")

    def result(self, ops: BlockOps[Packed, Step, Kv], x_NE: Tensor, step: Step, kv: Kv) -> Tensor:
        """Return W_O [o_1; ...; o_H]."""
        return ops.linear(self._attend(ops, x_NE, step, kv), self._o, self._layer, "o")

    def _attend(self, ops: BlockOps[Packed, Step, Kv], x_NE: Tensor, step: Step, kv: Kv) -> Tensor:
        """Return [o_1; ...; o_H] of each token, [N, H * V]."""
        layer = self._layer
        latents_ND = ops.linear(x_NE, self._kv_a, layer, "kv_a")
        if self._q_a is not None:
            assert self._q_a_norm is not None
            x_NE = self._normed(ops.linear(x_NE, self._q_a, layer, "q_a"), self._q_a_norm)
        queries_NHX = ops.linear(x_NE, self._q, layer, "q").unflatten(1, (self._spec.heads, -1))
        return self._attention(queries_NHX, latents_ND, step, kv)

    def _normed(self, x_NC: Tensor, weight_C: Tensor) -> Tensor:
        """Return the RMS norm of latent vectors, whose epsilon is not that of the stream's norms."""
        return self._device.norm_with(x_NC, weight_C, self._spec.latent_epsilon)
