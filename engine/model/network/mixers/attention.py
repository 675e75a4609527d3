"""`SoftmaxAttention`: grouped softmax attention with rotated heads.

    x' = x + norm_r(W_o softmax(s q k^T) v),   s = 1 / sqrt(D) or the model's own
    q, k, v = rope(norm_h(W_q n)), rope(norm_h(W_k n)), W_v n,   n = norm(x)

A model may lack each of these norms, and norm_h may be of each head or of all heads together. It may also come after
the rotation: q = norm_h(rope(W_q n)). Queries may have a factor that grows with their position (Meta AI, 2025). Values
may be normed too, without weights: v = norm_v(W_v n) or norm_v(W_k n). A layer may have queries alone, and read the
keys and values of an earlier one.
Vaswani et al. (2017), Su et al. (2021) for rope, Ainslie et al. (2023) for key heads shared by groups, Henry et al.
(2020) for norms of heads, Jiang et al. (2023) for windows. Scores and their softmax are the device's.
"""

from __future__ import annotations

from typing import Generic

from torch import Tensor

from headrace.engine.model.checkpoint.weights import SublayerWeights
from headrace.engine.model.network.operations import BlockOps, DeviceOps, Kv, Packed, Step
from headrace.engine.model.network.placement import Entry, add_result
from headrace.engine.model.spec import Attention, LayerSpec
from headrace.engine.model.value_normed import ValueNormedAttention
from headrace.ops.stream import HeadNorms, Stream

__all__ = ["SoftmaxAttention"]


class SoftmaxAttention(Generic[Packed, Step, Kv]):
    """Attention of one layer. Its state is the keys and values of the layer's pages."""

    def __init__(self, spec: LayerSpec, weights: SublayerWeights, ops: DeviceOps[Packed, Step, Kv], layer: int) -> None:
        """Pack the weights of the layer with the number `layer`."""
        vectors, matrices = weights.vectors, weights.matrices
        self._entry = Entry(vectors, ops)
        self.entry_norm_E: Tensor | None = self._entry.norm_E
        self._result_norm_E = vectors.get("result_norm_E")
        self._qkv = ops.pack(matrices["qkv"], vectors.get("qkv_bias"))
        self._o = ops.pack(matrices["o"], vectors.get("o_bias"))
        self._head_norms = None
        if (q_norm_D := vectors.get("q_norm_D")) is not None:  # a layer without keys of its own has no norm of keys
            self._head_norms = HeadNorms(q_norm_D, vectors.get("k_norm_D", q_norm_D))
        self._wide_norms = HeadNorms(vectors["q_norm_X"], vectors["k_norm_X"]) if "q_norm_X" in vectors else None
        self._heads_norm_X = vectors.get("heads_layer_norm_X")
        assert isinstance(spec.mixer, Attention)
        self._rotates_early, self._grows = spec.mixer.early_rope is not None, spec.mixer.growth is not None
        self._norms_values = isinstance(spec.mixer, ValueNormedAttention) and spec.mixer.source is None
        self._has_steps_between = spec.mixer.has_steps_before_attention
        self._device, self._layer = ops, layer
        if "sinks_H" in vectors:
            ops.keep_sinks(layer, vectors["sinks_H"])

    def __call__(
        self, ops: BlockOps[Packed, Step, Kv], stream: Stream, next_norm_E: Tensor | None, step: Step, kv: Kv
    ) -> Stream:
        """Return the stream with the attention's result added."""
        x_NX, total_NE = self._attend(ops, stream, step, kv)
        norms = self._result_norm_E, next_norm_E
        return add_result(ops, x_NX, self._o, total_NE, norms, self._layer, "o")

    def result(self, ops: BlockOps[Packed, Step, Kv], x_NE: Tensor, step: Step, kv: Kv) -> Tensor:
        """Return W_o softmax(s q k^T) v."""
        return ops.linear(self._attend_to(ops, x_NE, step, kv), self._o, self._layer, "o")

    def _attend(self, ops: BlockOps[Packed, Step, Kv], stream: Stream, step: Step, kv: Kv) -> tuple[Tensor, Tensor]:
        """Return (softmax(s q k^T) v, the sum of the stream)."""
        norm_E, layer = self.entry_norm_E, self._layer
        if norm_E is not None and not self._has_steps_between:
            return ops.attend(stream, norm_E, self._qkv, self._head_norms, step, kv, layer)
        x_NE, total_NE = self._entry(ops, stream)
        return self._attend_to(ops, x_NE, step, kv), total_NE

    def _attend_to(self, ops: BlockOps[Packed, Step, Kv], x_NE: Tensor, step: Step, kv: Kv) -> Tensor:
        """Return softmax(s q k^T) v of queries, keys and values that are products of `x_NE`."""
        qkv_NX = ops.linear(x_NE, self._qkv, self._layer, "qkv")
        if self._wide_norms is not None:
            qkv_NX = self._device.norm_across_heads(qkv_NX, self._wide_norms)
        if self._heads_norm_X is not None:
            qkv_NX = self._device.layer_norm_heads(qkv_NX, self._heads_norm_X)
        if self._norms_values:
            qkv_NX = self._device.norm_values(qkv_NX)
        if self._rotates_early:
            qkv_NX = self._device.rotate(qkv_NX, step)
        if self._grows:
            qkv_NX = self._device.grow(qkv_NX, step)
        return ops.attend_with(qkv_NX, self._head_norms, step, kv, self._layer)
