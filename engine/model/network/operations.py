"""The protocols between the network and a device's operations; knows neither a network nor a device.

`Packed` is a weight in the form in which the device multiplies by it, `Step` the places of a step's tokens in the cache
for one kind of mixer, and `Kv` the paged cache: each device has types of its own. Next to read:
ops/cpu/block.py, the plainest implementation.
"""

from __future__ import annotations

from typing import Protocol, TypeVar, runtime_checkable

from torch import Tensor

from headrace.ops.experts import Experts
from headrace.ops.formats import Stored
from headrace.ops.latents import LatentWeights
from headrace.ops.layer_weights import AttentionWeights, FeedWeights
from headrace.ops.stream import Activation, HeadNorms, LayerNorm, PlainActivation, Stream

__all__ = [
    "BlockOps",
    "DeviceOps",
    "Kv",
    "LayerOps",
    "Packed",
    "PackedExperts",
    "PackedLatents",
    "ReadableHead",
    "Step",
    "Table",
    "TableOps",
    "WholeLayer",
]

Packed = TypeVar("Packed")
Step = TypeVar("Step")
Kv = TypeVar("Kv")
_Packed = TypeVar("_Packed", contravariant=True)
_Step = TypeVar("_Step", contravariant=True)
_Kv = TypeVar("_Kv", contravariant=True)


class Table(Protocol):
    """Protocol of embeddings: a tensor [V, E], or something else that hands out its rows."""

    def __getitem__(self, ids_N: Tensor, /) -> Tensor:
        """Return the rows `ids_N` (int32 or int64), [N, E]."""
        ...


@runtime_checkable
class TableOps(Protocol):
    """Protocol of a device's operations that hand out the rows of a table in a layout of the device's own."""

    def read_table(self, table_VE: Stored, /) -> Table:
        """Return the rows of `table_VE`, whose memory they share."""
        ...


@runtime_checkable
class ReadableHead(Protocol):
    """Protocol of a packed head that hands out its rows: the embeddings of a model that ties the two."""

    def read_rows(self, ids_N: Tensor) -> Tensor:
        """Return the rows `ids_N` (int32 or int64), [N, E]."""
        ...


class PackedExperts(Protocol):
    """Protocol of a layer's router and experts in the form in which a device computes them."""

    def __call__(self, x_NE: Tensor, routed_NE: Tensor | None = None, /) -> Tensor:
        """Return the weighted sum of the results of each token's experts, [N, E], in the dtype of `x_NE`.

        The sum is taken in the order of the choice, the best expert first, and a token's result does not depend on the
        tokens that are computed with it. Rows behind the step's tokens are routed nowhere: their results do not matter.

        Args:
            x_NE: Normed input, in the dtype of products.
            routed_NE: Input of the router, in the same dtype; None where it is `x_NE`.
        """
        ...


class WholeLayer(Protocol[_Step, _Kv]):
    """Protocol of a layer that a device computes by one operation."""

    def __call__(self, stream: Stream, step: _Step, kv: _Kv, /) -> Stream:
        """Return the stream with the results of the layer's mixer and feed added; nothing may be pending."""
        ...


@runtime_checkable
class LayerOps(Protocol[_Packed, _Step, _Kv]):
    """Protocol of a device's operations that compute layers of attention and gated feed as a whole."""

    def whole_layer(
        self, attention: AttentionWeights[_Packed], feed: FeedWeights[_Packed], layer: int, /
    ) -> WholeLayer[_Step, _Kv]:
        """Return the layer with the number `layer` as one operation, with the bits that its parts give."""
        ...


class PackedLatents(Protocol[_Step, _Kv]):
    """Protocol of a layer's attention to latent vectors, ready for a device."""

    def __call__(self, queries_NHX: Tensor, latents_ND: Tensor, step: _Step, kv: _Kv, /) -> Tensor:
        """Store the tokens' vectors in their pages, attend, and return the values of all heads, [N, H * V].

        Args:
            queries_NHX: By head, the part of the query that stays as it is, then the part that is to be rotated.
            latents_ND: By token, its latent vector before its norm, then the key of all heads before its rotation.
            step: The places of the step's tokens in the cache.
            kv: The paged cache.
        """
        ...


class BlockOps(Protocol[_Packed, _Step, _Kv]):
    """Protocol of the operations of one step, with the updates of the adapters that its tokens use, if any.

    Every operation that reads a `Stream` computes its norm first, and returns the sum of the stream beside its result.
    `layer` and `site` (one of adapters/layout.py's) say whose updates a product gets.
    """

    def embed(self, x_NE: Tensor, tokens_N: Tensor) -> Tensor:
        """Return the step's embeddings with updates added; virtual tokens have embeddings of their own."""
        ...

    def attend(
        self,
        stream: Stream,
        norm_E: Tensor,
        qkv: _Packed,
        head_norms: HeadNorms | None,
        step: _Step,
        kv: _Kv,
        layer: int,
    ) -> tuple[Tensor, Tensor]:
        """Return (softmax(s q k^T) v, [N, H * D]; the sum of the stream), with the factor s of the mixer.

        Queries, keys and values are the product of the norm; q and k are normed, if `head_norms`, and rotated, and k
        and v are stored in their pages.
        """
        ...

    def feed(self, stream: Stream, norm_E: Tensor, gate_up: _Packed, layer: int) -> tuple[Tensor, Tensor]:
        """Return (silu(gate) * up, [N, F]; the sum of the stream); F gates, then F ups are the product of the norm."""
        ...

    def add(
        self, x_NI: Tensor, packed: _Packed, total_NE: Tensor, norm_E: Tensor | None, layer: int, site: str
    ) -> Stream:
        """Return the stream `total + x W^T + b`; `norm_E` is the norm that will read it, None behind the last layer."""
        ...

    def attend_with(self, qkv_NX: Tensor, head_norms: HeadNorms | None, step: _Step, kv: _Kv, layer: int) -> Tensor:
        """Do what `attend` does from the product on: return [N, H * D] from queries, keys and values side by side.

        In a layer that reads the keys and values of an earlier one, there are queries alone, and nothing is stored.
        """
        ...

    def linear(self, x_NI: Tensor, packed: _Packed, layer: int, site: str) -> Tensor:
        """Return x W^T + b, [N, O]; leaves `x_NI` as it is."""
        ...

    def summed(self, stream: Stream) -> tuple[Tensor, Tensor]:
        """Return (the stream's sum in the dtype of products, the sum); nothing may be pending."""
        ...

    def normed(self, stream: Stream, norm_E: Tensor) -> tuple[Tensor, Tensor]:
        """Return (RMS norm of the stream's sum s, s): s / sqrt(mean(s^2) + eps) * w (Zhang and Sennrich, 2019)."""
        ...

    def logits(self, x_SE: Tensor, head: _Packed) -> Tensor:
        """Return x W^T of the output head, float32 [S, V], whatever the dtype of `x_SE`."""
        ...


class DeviceOps(BlockOps[Packed, _Step, _Kv], Protocol[Packed, _Step, _Kv]):
    """Protocol of a device's operations without adapters, with those that no adapter changes.

    They also pack the weights for all others.
    """

    def activate(self, gate_up_N2F: Tensor, activation: Activation) -> Tensor:
        """Return activation(gate) * up, [N, F], where each token has F gates, then F ups."""
        ...

    def activate_plain(self, x_NF: Tensor, activation: PlainActivation) -> Tensor:
        """Return activation(x), [N, F]; the result may be `x_NF` itself, changed in place."""
        ...

    def layer_norm(self, x_NE: Tensor, norm: LayerNorm) -> Tensor:
        """Return (x - mean(x)) / sqrt(var(x) + eps) * w + b in the dtype of products; leaves `x_NE` as it is."""
        ...

    def positions(self, step: _Step) -> Tensor:
        """Return the position of each token of a step in its own sequence, int32 or int64."""
        ...

    def norm_across_heads(self, qkv_NX: Tensor, norms: HeadNorms) -> Tensor:
        """Return queries, keys and values side by side with an RMS norm of all queries, and one of all keys.

        The result may be `qkv_NX` itself, changed in place. The norms' weights are [H * D] and [K * D].
        """
        ...

    def layer_norm_heads(self, qkv_NX: Tensor, weight_X: Tensor) -> Tensor:
        """Return queries, keys and values side by side with a layer norm of each query and key head.

        The result may be `qkv_NX` itself, changed in place. The norms' weights are [(H + K) * D], and have no biases.
        """
        ...

    def norm_values(self, qkv_NX: Tensor) -> Tensor:
        """Return queries, keys and values side by side with an RMS norm without weights of each value head.

        Where the input has queries and keys alone, the values are normed copies of the keys. The result may be
        `qkv_NX` itself, changed in place.
        """
        ...

    def rotate(self, qkv_NX: Tensor, step: _Step) -> Tensor:
        """Return queries, keys and values side by side with queries and keys rotated, before the norms of their heads.

        The result may be `qkv_NX` itself, changed in place.
        """
        ...

    def grow(self, qkv_NX: Tensor, step: _Step) -> Tensor:
        """Return queries, keys and values side by side with each token's queries times the factor of its position.

        The result may be `qkv_NX` itself, changed in place.
        """
        ...

    def norm_with(self, x_NC: Tensor, weight_C: Tensor, epsilon: float) -> Tensor:
        """Return the RMS norm of vectors with an epsilon of their own, in their dtype; leaves `x_NC` as it is.

        A GPU has it for models with latent vectors alone.
        """
        ...

    def pack(self, weight: Stored, bias_O: Tensor | None) -> Packed:
        """Return a weight [O, I] and its bias in the form in which this device multiplies by them."""
        ...

    def pack_head(self, weight_VE: Stored) -> Packed:
        """Return the output head's weight in the form in which this device multiplies by it."""
        ...

    def keep_sinks(self, layer: int, sinks_H: Tensor) -> None:
        """Take the scores, float32, of the keys without values that a layer's attention has, one in each head."""
        ...

    def pack_latents(self, weights: LatentWeights, layer: int) -> PackedLatents[_Step, _Kv]:
        """Return a layer's attention to latent vectors, with its weights in the form in which this device uses them."""
        ...

    def pack_experts(self, experts: Experts) -> PackedExperts:
        """Return a layer's router and experts in the form in which this device computes them.

        Raises:
            ModelRejected: This device does not compute such experts.
        """
        ...
