"""`DecoderSpec`: the shape of a decoder, layer by layer; never imports torch, reads a file or computes.

Each layer has a mixer, which lets tokens see those before them, and a feed, which treats every token alone. Their specs
say which parameters they have and what they keep of the tokens before. families/ reads specs from configurations,
network/ computes each kind of mixer and feed. Next to read: families/llama.py, then network/decoder.py.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Final

from headrace.adapters.untrusted import refuse
from headrace.engine.model.norms import Norms
from headrace.engine.model.roles import Fused, Names, Part, bias, head_norm_roles, matrix, norm
from headrace.engine.model.rope import PositionTable, QueryGrowth, Rope
from headrace.engine.model.tail import LayerTail, PerLayerEmbedding
from headrace.ops.stream import Activation, PlainActivation

__all__ = [
    "LIMITS",
    "Attention",
    "DecoderSpec",
    "DenseFeed",
    "FeedSpec",
    "LayerSpec",
    "MixerSpec",
    "Norms",
    "Paged",
    "PerRow",
    "PlainFeed",
    "SinkAttention",
    "SoftcappedAttention",
]

LIMITS: Final = {
    "num_layers": 1024,
    "hidden_size": 1 << 17,
    "num_heads": 1024,
    "num_kv_heads": 1024,
    "head_dim": 1024,
    "ffn_size": 1 << 20,
    "vocab_size": 1 << 22,
    "max_context": 1 << 25,
}
"""Largest sizes that a file may ask for."""


@dataclass(frozen=True, slots=True)
class Paged:
    """State of a mixer that lies in the pages of the cache."""

    elements: int
    """Elements that each token adds: its key and its value in all heads."""
    window: int | None = None
    """Number of last tokens whose state is read, the newest included; None for all."""
    source: int | None = None
    """Number of an earlier layer whose state is read, so that `elements` is 0; None for a state of its own."""


@dataclass(frozen=True, slots=True)
class PerRow:
    """State of a mixer that is of one size however many tokens a row has."""

    elements: int
    """Elements of one row's state."""


class MixerSpec(ABC):
    """Base of the specs of mixers: frozen dataclasses, which say what a layer's mixer is."""

    __slots__ = ()

    @property
    @abstractmethod
    def state(self) -> Paged | PerRow:
        """What the mixer keeps of a row's tokens from one step to the next."""

    @abstractmethod
    def parameters(self, hidden_size: int) -> Mapping[str, Fused]:
        """Return the mixer's parameters, but its layer's norms, by their names in `SublayerWeights`."""


class FeedSpec(ABC):
    """Base of the specs of feeds: frozen dataclasses, which say what a layer's feed-forward network is."""

    __slots__ = ()

    @abstractmethod
    def parameters(self, hidden_size: int) -> Mapping[str, Fused]:
        """Return the feed's parameters, but its layer's norms, by their names in `SublayerWeights`."""


@dataclass(frozen=True, slots=True)
class Attention(MixerSpec):
    """Softmax attention with rotated heads, in which groups of query heads share a key head.

    Vaswani et al. (2017), Su et al. (2021), Ainslie et al. (2023).
    """

    scores: ClassVar[str] = "softmax"
    """Function by which scores become weights of values; a variant of attention is a subclass that names its own."""
    heads: int
    kv_heads: int
    head_dim: int
    rope: int = 0
    """Index of the rotary embedding in `DecoderSpec.ropes`."""
    early_rope: int | None = None
    """Index of a rotary embedding that comes before the norms of heads, where `rope` comes after them; None if none."""
    window: int | None = None
    """Number of last positions that a token attends to, itself included; None for all."""
    qk_norm: bool = False
    """Whether each query and key head is RMS-normalised before the rotation by `rope`."""
    qk_norm_across_heads: bool = False
    """Whether all query heads together, and all key heads together, are RMS-normalised before rotation."""
    qk_layer_norm: bool = False
    """Whether each query and key head has a layer norm without a bias, of weights of its own, before rotation."""
    qkv_bias: bool = False
    o_bias: bool = False
    scale: float | None = None
    """Factor of the scores; None for 1 / sqrt(head_dim)."""
    growth: QueryGrowth | None = None
    """Factor of queries that grows with their position; None for none."""
    rotary_dim: int | None = None
    """Number of first elements of each head that are rotated; None for all."""
    interleaved: bool = False
    """Whether checkpoints and adapters hold pairs of rotated elements side by side, not half of the rotated part apart.
    The loader puts them in the order that devices know (rope.py)."""

    @property
    def has_steps_before_attention(self) -> bool:
        """Whether queries and keys pass operations of their own between their product and attention."""
        norms = self.qk_norm_across_heads or self.qk_layer_norm
        return norms or self.early_rope is not None or self.growth is not None

    @property
    def rotated_dim(self) -> int:
        """Number of elements of each head that are rotated."""
        return self.head_dim if self.rotary_dim is None else self.rotary_dim

    @property
    def state(self) -> Paged:
        """Return what each token adds to the pages: one key and one value of `head_dim` elements in each key head."""
        return Paged(2 * self.kv_heads * self.head_dim, self.window)

    def parameters(self, hidden_size: int) -> dict[str, Fused]:
        """Return the products of queries, keys and values as one, that of the output, and norms of heads."""
        queries, keys = self.heads * self.head_dim, self.kv_heads * self.head_dim
        rows = {"q": queries, "k": keys, "v": keys}
        found = {
            "qkv": matrix(hidden_size, **rows),
            "o": matrix(queries, o=hidden_size),
        }
        if self.qkv_bias:
            found["qkv_bias"] = bias(**rows)
        if self.o_bias:
            found["o_bias"] = bias(o=hidden_size)
        if self.qk_norm:
            found["q_norm_D"] = norm(q_norm=self.head_dim)
            found["k_norm_D"] = norm(k_norm=self.head_dim)
        if self.qk_norm_across_heads:
            found["q_norm_X"], found["k_norm_X"] = norm(q_norm=queries), norm(k_norm=keys)
        if self.qk_layer_norm:
            roles = head_norm_roles(self.heads, self.kv_heads)
            found["heads_layer_norm_X"] = norm(**dict.fromkeys(roles, self.head_dim))
        sizes = self.head_dim, self.rotated_dim
        return {name: fused.rotated(*sizes, interleaved=self.interleaved) for name, fused in found.items()}


@dataclass(frozen=True, slots=True)
class SoftcappedAttention(Attention):
    """Attention whose scores stay between -cap and cap: cap * tanh(score / cap) (Bello et al., 2016)."""

    scores: ClassVar[str] = "softcap"
    cap: float = 50.0


@dataclass(frozen=True, slots=True)
class SinkAttention(Attention):
    """Attention with a learned score of each head, its sink, that takes weight from all keys and has no value.

    OpenAI (2025), "gpt-oss-120b and gpt-oss-20b model card"; after Miller (2023), "Attention is off by one".
    """

    scores: ClassVar[str] = "sink"

    def parameters(self, hidden_size: int) -> dict[str, Fused]:
        """Return the parameters of any attention, and the sinks."""
        sinks = Fused((Part("attention.sinks", self.heads),), None, in_float32=True)
        return {**Attention.parameters(self, hidden_size), "sinks_H": sinks}


@dataclass(frozen=True, slots=True)
class DenseFeed(FeedSpec):
    """Gated feed-forward network down(act(gate(x)) * up(x)) (Shazeer, 2020)."""

    size: int
    """Width of the gate."""
    bias: bool = False
    activation: Activation = "silu"

    def parameters(self, hidden_size: int) -> dict[str, Fused]:
        """Return the products of gate and up as one, and that of down."""
        rows = {"gate": self.size, "up": self.size}
        found = {
            "gate_up": matrix(hidden_size, **rows),
            "down": matrix(self.size, down=hidden_size),
        }
        if self.bias:
            found["gate_up_bias"] = bias(**rows)
            found["down_bias"] = bias(down=hidden_size)
        return found


@dataclass(frozen=True, slots=True)
class PlainFeed(FeedSpec):
    """Feed-forward network without a gate, down(act(up(x))) (Vaswani et al., 2017)."""

    size: int
    """Width of what is activated."""
    bias: bool = True
    activation: PlainActivation = "gelu"

    def parameters(self, hidden_size: int) -> dict[str, Fused]:
        """Return the products of up and down."""
        found = {"up": matrix(hidden_size, up=self.size), "down": matrix(self.size, down=hidden_size)}
        if self.bias:
            found["up_bias"], found["down_bias"] = bias(up=self.size), bias(down=hidden_size)
        return found


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """One layer: a mixer, then a feed, each of which adds to the residual stream."""

    mixer: MixerSpec
    feed: FeedSpec
    norms: Norms
    tail: LayerTail | None = None
    """What follows the feed; None where the layer ends with it."""

    def parameters(self, hidden_size: int) -> tuple[dict[str, Fused], dict[str, Fused]]:
        """Return the parameters of mixer and feed by their names in `SublayerWeights`, norms first, a tail last."""
        tail = {} if self.tail is None else self.tail.parameters(hidden_size)
        return (
            {**self.norms.parameters(hidden_size, "mixer"), **self.mixer.parameters(hidden_size)},
            {**self.norms.parameters(hidden_size, "feed"), **self.feed.parameters(hidden_size), **tail},
        )


@dataclass(frozen=True, slots=True)
class DecoderSpec:
    """Shape of a decoder: everything that the network must know of a model, apart from its weights."""

    architecture: str
    layers: tuple[LayerSpec, ...]
    ropes: tuple[Rope, ...]
    """Rotary embeddings that the layers refer to."""
    hidden_size: int
    vocab_size: int
    max_context: int
    """Most tokens of a prompt and its completion together."""
    norm_eps: float
    """Epsilon of the norm behind the last layer, which is of the kind of that layer's own."""
    tied_head: bool
    names: Names
    """Names of the tensors in the checkpoint that the spec was read from."""
    has_head: bool = True
    """Whether the model chooses tokens; without a head it only embeds, and `tied_head` is True."""
    embedding_scale: float = 1.0
    """Factor of the embeddings on their way into the first layer."""
    scales_virtual_tokens: bool = True
    """Whether the embeddings of virtual tokens (prompt tuning) get that factor, too."""
    logits_scale: float = 1.0
    """Factor of the last hidden states on their way into the head."""
    logits_cap: float | None = None
    """Bound c within which logits x stay, as c * tanh(x / c); None for no bound."""
    head_bias: bool = False
    """Whether the output head adds a bias to the logits."""
    positions: PositionTable | None = None
    """Learned embeddings of positions; None without."""
    per_layer: PerLayerEmbedding | None = None
    """Embeddings that each layer has for itself; None without."""
    checkpoint_dtype: str | None = None
    """Dtype `float32`, `bfloat16` or `float16` if the config names it; None for GGUF, whose tensors differ."""

    @property
    def num_layers(self) -> int:
        """Number of layers."""
        return len(self.layers)

    @property
    def mixer_kinds(self) -> tuple[MixerSpec, ...]:
        """The different mixers of the layers, each once, in the order of the layers."""
        return tuple(dict.fromkeys(layer.mixer for layer in self.layers))

    @property
    def windows(self) -> tuple[int | None, ...]:
        """Number of last positions that each layer's mixer reads; None for all.

        Raises:
            ModelRejected: The state of a mixer is not in pages.
        """
        found = []
        for layer in self.layers:
            state = layer.mixer.state
            if not isinstance(state, Paged):
                refuse(self.architecture, "the mixer of a layer", layer.mixer, "mixers whose state is in pages")
            found.append(state.window)
        return tuple(found)

    @property
    def has_pre_norms_alone(self) -> bool:
        """Whether all norms are RMS norms of the stream before a mixer or feed, or of single heads before rotation."""
        apart = any(isinstance(kind, Attention) and kind.has_steps_before_attention for kind in self.mixer_kinds)
        norms = (layer.norms for layer in self.layers)
        return not apart and all(each.placement == "pre" and each.kind == "rms" for each in norms)

    @property
    def has_biases(self) -> bool:
        """Whether a product or norm within the layers has a bias."""
        plans = (plan for layer in self.layers for plan in layer.parameters(self.hidden_size))
        return any(fused.is_bias for plan in plans for fused in plan.values())

    @property
    def attention_kinds(self) -> tuple[Attention, ...]:
        """The different mixers of a model whose layers all attend with heads of one number and size.

        Raises:
            ModelRejected: A layer has other heads, or no attention: a GPU's cache cannot hold it.
        """
        found: list[Attention] = []
        for mixer in self.mixer_kinds:
            if not isinstance(mixer, Attention):
                refuse(self.architecture, "the mixer of a layer", mixer, "attention")
            found.append(mixer)
        for mixer in found:
            if (mixer.heads, mixer.kv_heads, mixer.head_dim) != (found[0].heads, found[0].kv_heads, found[0].head_dim):
                refuse(self.architecture, "the heads of a layer", mixer, "the same in all layers")
        return tuple(found)

    @property
    def has_softmax_alone(self) -> bool:
        """Whether all layers attend to keys and values, and none's scores become weights in a way of its own."""
        return all(isinstance(kind, Attention) and kind.scores == Attention.scores for kind in self.mixer_kinds)

    @property
    def cached_elements(self) -> int:
        """Elements that each token adds to the cache, over all layers."""
        states = (layer.mixer.state for layer in self.layers)
        return sum(state.elements for state in states if isinstance(state, Paged))

    @property
    def uniform_attention(self) -> Attention:
        """Attention of the first layer, whose heads are those of every layer; windows may differ.

        Raises:
            ModelRejected: The same errors as from `attention_kinds`.
        """
        return self.attention_kinds[0]

    @property
    def uniform_epsilon(self) -> float:
        """Epsilon of all norms.

        Raises:
            ModelRejected: The norms of some layers have another one.
        """
        for layer in self.layers:
            if layer.norms.epsilon != self.norm_eps:
                refuse(self.architecture, "the epsilon of a norm", layer.norms.epsilon, self.norm_eps)
        return self.norm_eps
