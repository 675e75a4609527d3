"""`CalibrationOps`: a decoder's operations on whole sequences in float32, which report the inputs of each product.

They keep no cache: every sequence is computed from its start, as plain torch does it on any device. The layers
themselves are those of network/.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, NoReturn, TypeAlias

import torch
from torch import Tensor
from torch.nn import functional

from headrace.adapters.untrusted import refuse
from headrace.engine.model.network.rotation import growth_table, rotation_table
from headrace.engine.model.spec import Attention, DecoderSpec, LayerSpec
from headrace.ops.cpu.activation import activate, activate_plain
from headrace.ops.cpu.norms import layer_norm, layer_norm_heads
from headrace.ops.experts import Experts
from headrace.ops.formats import Stored
from headrace.ops.latents import LatentWeights
from headrace.ops.stream import Activation, HeadNorms, LayerNorm, PlainActivation, Stream

__all__ = ["CalibrationOps", "DenseProduct"]


_Table: TypeAlias = tuple[Tensor, Tensor]
"""Cosines and sines, [tokens, head_dim] each."""


class DenseProduct(NamedTuple):
    """A weight and its bias, ready to multiply."""

    weight: Stored
    dense_OI: Tensor
    bias_O: Tensor | None


class CalibrationOps:
    """The operations of one layer; a step is the number of tokens of each of its sequences, which lie end to end."""

    def __init__(
        self,
        spec: DecoderSpec,
        layer: LayerSpec,
        tokens: int,
        seen: Callable[[Stored, Tensor], None],
        device: torch.device,
    ) -> None:
        """Prepare for sequences of `tokens` tokens.

        Args:
            spec: The shape of the model.
            layer: The layer's own shape.
            tokens: Tokens of each sequence.
            seen: Called with each weight and the inputs [N, in] that it is about to multiply.
            device: The device of all tensors.

        Raises:
            ModelRejected: The layer's mixer is not softmax attention.
        """
        mixer = layer.mixer
        if not isinstance(mixer, Attention) or mixer.scores != Attention.scores:
            refuse(spec.architecture, "the mixer of a layer", mixer, "softmax attention, to calibrate with data")
        self._mixer, self._epsilon, self._seen = mixer, layer.norms.epsilon, seen

        def table(rope: int) -> _Table:
            return _wide(rotation_table(spec.ropes[rope], mixer, tokens, device, context=spec.max_context))

        self._table = table(mixer.rope)
        self._early_table = None if mixer.early_rope is None else table(mixer.early_rope)
        self._growth_T = growth_table(mixer, tokens, device)
        self._mask_TT: Tensor | None = None
        if mixer.window is not None and mixer.window < tokens:
            every_TT = torch.ones(tokens, tokens, dtype=torch.bool, device=device)
            self._mask_TT = every_TT.tril().triu(1 - mixer.window)

    def pack(self, weight: Stored, bias_O: Tensor | None) -> DenseProduct:
        """Return a weight ready to multiply in float32."""
        return DenseProduct(weight, weight.dense(torch.float32), bias_O)

    def keep_sinks(self, layer: int, sinks_H: Tensor) -> NoReturn:
        """Raise `ModelRejected`: sinks are not computed here."""
        refuse("model", "the sinks of a layer's heads", len(sinks_H), "plain softmax, to calibrate with data")

    def norm_with(self, x_NC: Tensor, weight_C: Tensor, epsilon: float) -> Tensor:
        """Return the RMS norm of vectors with an epsilon of their own."""
        return x_NC * (x_NC.square().mean(-1, keepdim=True) + epsilon).rsqrt() * weight_C

    def pack_latents(self, weights: LatentWeights, layer: int) -> NoReturn:
        """Raise `ModelRejected`: attention to latent vectors is not computed here."""
        refuse("model", "the mixer of a layer", "latent attention", "plain softmax, to calibrate with data")

    def pack_experts(self, experts: Experts) -> NoReturn:
        """Raise `ModelRejected`: some experts may see too few of the tokens to be calibrated with."""
        refuse("model", "experts", experts.routing, "dense feeds, to calibrate with data")

    def pack_head(self, weight_VE: Stored) -> DenseProduct:
        """Return the output head ready to multiply in float32."""
        return self.pack(weight_VE, None)

    def embed(self, x_NE: Tensor, tokens_N: Tensor) -> Tensor:
        """Return the embeddings as they are."""
        return x_NE

    def linear(self, x_NI: Tensor, packed: DenseProduct, layer: int, site: str) -> Tensor:
        """Return x W^T + b."""
        self._seen(packed.weight, x_NI)
        return functional.linear(x_NI, packed.dense_OI, packed.bias_O)

    def logits(self, x_SE: Tensor, head: DenseProduct) -> Tensor:
        """Return x W^T of the output head."""
        return self.linear(x_SE, head, -1, "head")

    def summed(self, stream: Stream) -> tuple[Tensor, Tensor]:
        """Return the stream's sum, twice."""
        total_NE = stream.x_NE if stream.total_NE is None else stream.total_NE + stream.x_NE
        return total_NE, total_NE

    def normed(self, stream: Stream, norm_E: Tensor) -> tuple[Tensor, Tensor]:
        """Return the RMS norm of the stream's sum, and the sum."""
        total_NE, _ = self.summed(stream)
        return self._rms(total_NE, norm_E), total_NE

    def activate(self, gate_up_N2F: Tensor, activation: Activation) -> Tensor:
        """Return activation(gate) * up."""
        return activate(gate_up_N2F, activation)

    def activate_plain(self, x_NF: Tensor, activation: PlainActivation) -> Tensor:
        """Return activation(x)."""
        return activate_plain(x_NF, activation)

    def layer_norm(self, x_NE: Tensor, norm: LayerNorm) -> Tensor:
        """Return the layer norm of each token."""
        return layer_norm(x_NE, norm, self._epsilon)

    def positions(self, step: int) -> Tensor:
        """Return the positions of the tokens of one sequence."""
        return torch.arange(step)

    def norm_across_heads(self, qkv_NX: Tensor, norms: HeadNorms) -> Tensor:
        """Return queries, keys and values with an RMS norm of all queries, and one of all keys."""
        queries, keys = (count * self._mixer.head_dim for count in (self._mixer.heads, self._mixer.kv_heads))
        q_NX, k_NX, v_NX = qkv_NX.split((queries, keys, keys), 1)
        return torch.cat((self._rms(q_NX, norms.q_D), self._rms(k_NX, norms.k_D), v_NX), 1)

    def layer_norm_heads(self, qkv_NX: Tensor, weight_X: Tensor) -> Tensor:
        """Return queries, keys and values with a layer norm of each query and key head."""
        return layer_norm_heads(qkv_NX, weight_X, self._mixer.head_dim, self._epsilon)

    def norm_values(self, qkv_NX: Tensor) -> NoReturn:
        """Raise `ModelRejected`: norms of values are not computed here."""
        refuse("model", "the values of a layer's heads", "with norms", "without norms, to calibrate with data")

    def rotate(self, qkv_NX: Tensor, step: int) -> Tensor:
        """Return queries, keys and values with queries and keys rotated."""
        assert self._early_table is not None
        rotated = self._mixer.heads + self._mixer.kv_heads
        all_SXTD = qkv_NX.view(-1, step, rotated + self._mixer.kv_heads, self._mixer.head_dim).transpose(1, 2)
        turned_SXTD = _rotated(all_SXTD[:, :rotated], self._early_table)
        return torch.cat((turned_SXTD, all_SXTD[:, rotated:]), 1).transpose(1, 2).reshape(qkv_NX.shape)

    def grow(self, qkv_NX: Tensor, step: int) -> Tensor:
        """Return queries, keys and values with queries times the factors of their positions."""
        assert self._growth_T is not None
        width = self._mixer.heads * self._mixer.head_dim
        factors_N1 = self._growth_T.repeat(len(qkv_NX) // step).unsqueeze(1)
        return torch.cat((qkv_NX[:, :width] * factors_N1, qkv_NX[:, width:]), 1)

    def attend(
        self,
        stream: Stream,
        norm_E: Tensor,
        qkv: DenseProduct,
        head_norms: HeadNorms | None,
        step: int,
        kv: None,
        layer: int,
    ) -> tuple[Tensor, Tensor]:
        """Return (the attention's values [N, H * D], the sum of the stream)."""
        x_NE, total_NE = self.normed(stream, norm_E)
        return self.attend_with(self.linear(x_NE, qkv, layer, "qkv"), head_norms, step, kv, layer), total_NE

    def attend_with(self, qkv_NX: Tensor, head_norms: HeadNorms | None, step: int, kv: None, layer: int) -> Tensor:
        """Return the attention's values [N, H * D] from queries, keys and values side by side."""
        heads, kv_heads, size = self._mixer.heads, self._mixer.kv_heads, self._mixer.head_dim
        all_SXTD = qkv_NX.view(-1, step, heads + 2 * kv_heads, size).transpose(1, 2)
        q_SHTD, k_SKTD, v_SKTD = all_SXTD.split([heads, kv_heads, kv_heads], dim=1)
        if head_norms is not None:
            q_SHTD, k_SKTD = self._rms(q_SHTD, head_norms.q_D), self._rms(k_SKTD, head_norms.k_D)
        o_SHTD = functional.scaled_dot_product_attention(
            _rotated(q_SHTD, self._table),
            _rotated(k_SKTD, self._table),
            v_SKTD,
            attn_mask=self._mask_TT,
            is_causal=self._mask_TT is None,
            scale=self._mixer.scale,
            enable_gqa=heads != kv_heads,
        )
        return o_SHTD.transpose(1, 2).reshape(-1, heads * size)

    def feed(self, stream: Stream, norm_E: Tensor, gate_up: DenseProduct, layer: int) -> tuple[Tensor, Tensor]:
        """Return (silu(gate) * up, the sum of the stream)."""
        x_NE, total_NE = self.normed(stream, norm_E)
        return self.activate(self.linear(x_NE, gate_up, layer, "gate_up"), "silu"), total_NE

    def add(
        self, x_NI: Tensor, packed: DenseProduct, total_NE: Tensor, norm_E: Tensor | None, layer: int, site: str
    ) -> Stream:
        """Return the stream with x W^T + b added."""
        return Stream(self.linear(x_NI, packed, layer, site), total_NE)

    def _rms(self, x: Tensor, weight: Tensor) -> Tensor:
        return x * (x.square().mean(-1, keepdim=True) + self._epsilon).rsqrt() * weight


def _wide(table: tuple[Tensor, Tensor]) -> _Table:
    """Return cosines and sines of pairs for both elements of each."""
    cos_TC, sin_TC = table
    return cos_TC.repeat(1, 2), sin_TC.repeat(1, 2)


def _rotated(x_SXTD: Tensor, table: _Table) -> Tensor:
    first, second = x_SXTD.chunk(2, dim=-1)
    return x_SXTD * table[0] + torch.cat((-second, first), dim=-1) * table[1]
