"""`GgufHeader`: shared reading of a GGUF file's metadata and tensor shapes; families call it, it knows none of them.

checkpoint/gguf.py reads the weights.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final, Literal

from headrace.adapters.untrusted import Fields, refuse
from headrace.engine.model.families.gguf_rope import ROPE_TENSORS, read_gguf_rope, stretched_context
from headrace.engine.model.families.sizes import check_heads, head_size, within
from headrace.engine.model.roles import Names
from headrace.engine.model.rope import Rope
from headrace.engine.model.spec import LIMITS, Attention, DecoderSpec, DenseFeed, LayerSpec, Norms, PlainFeed
from headrace.ops.stream import PlainActivation

__all__ = ["GGUF_NAMES", "GgufHeader"]

# Keys by which a GGUF file may describe its architecture; any other under `<architecture>.` would be ignored.
_IGNORED: Final = frozenset(
    (
        "vocab_size",
        "rope.dimension_count",
        "rope.scaling.finetuned",
        "attention.value_length",
        "tensor_data_layout",
    )
)
_USED: Final = frozenset(
    (
        "block_count",
        "context_length",
        "embedding_length",
        "feed_forward_length",
        "attention.head_count",
        "attention.head_count_kv",
        "attention.key_length",
        "attention.layer_norm_rms_epsilon",
        "rope.freq_base",
        "rope.scaling.type",
        "rope.scaling.factor",
        "rope.scaling.original_context_length",
        "rope.scaling.attn_factor",
        "rope.scaling.yarn_attn_factor",
        "rope.scaling.yarn_beta_fast",
        "rope.scaling.yarn_beta_slow",
    )
)
_NEUTRAL: Final[dict[str, tuple[object, ...]]] = {
    "attention.causal": (True,),
    "attention.scale": (0.0,),
    "attention.max_alibi_bias": (0.0,),
    "attention.clamp_kqv": (0.0,),
    "attention.sliding_window": (0,),
    "expert_count": (0,),
    "expert_used_count": (0,),
    "rope.scaling.yarn_ext_factor": (1.0,),
    "rope.scaling.yarn_log_multiplier": (0.0,),
    "use_parallel_residual": (False,),
}

GGUF_NAMES = Names(
    layer_prefix="blk.{}.",
    roles={
        "embedding": "token_embd",
        "final_norm": "output_norm",
        "head": "output",
        "mixer_norm": "attn_norm",
        "mixer_result_norm": "post_attention_norm",
        "q": "attn_q",
        "k": "attn_k",
        "v": "attn_v",
        "o": "attn_output",
        "q_norm": "attn_q_norm",
        "k_norm": "attn_k_norm",
        "qkv": "attn_qkv",
        "feed_norm": "ffn_norm",
        "feed_result_norm": "post_ffw_norm",
        "gate": "ffn_gate",
        "up": "ffn_up",
        "down": "ffn_down",
    },
    # GgufFile.spec() has put these tensors into the spec.
    harmless=re.compile("|".join(map(re.escape, ROPE_TENSORS))),
    is_peft=False,
)
"""Names that llama.cpp gives to the roles in all architectures that have them."""


@dataclass(frozen=True, slots=True)
class GgufHeader(Fields):
    """The metadata and shapes of a GGUF file. Every method refuses a value that is not supported, by its key."""

    name: str
    """The file's `general.architecture`, which most keys begin with."""
    architecture: str
    """The same architecture's name in Hugging Face configs."""
    shapes: Mapping[str, Sequence[int]]
    """Tensor names to shapes, outer size first."""
    rope_tensors: Mapping[str, tuple[float, ...]]
    """The numbers of those of `ROPE_TENSORS` that the file has."""

    def check(self, heeded: Iterable[str] = ()) -> None:
        """Refuse keys of the architecture that nobody reads; `heeded` are those that the family reads."""
        prefix = f"{self.name}."
        for key, value in self.data.items():
            short = key.removeprefix(prefix)
            if short == key or short in _IGNORED or short in _USED or short in heeded:
                continue
            if short not in _NEUTRAL or value not in _NEUTRAL[short]:
                self.refuse(key, _NEUTRAL.get(short, ("models without this key",))[0])

    def key(self, short: str) -> str:
        """Return the metadata's name of a key of the architecture."""
        return f"{self.name}.{short}"

    def lacks(self, field: str, default: int | None = None) -> bool:
        """Return whether a key is 0, or is absent and `default`, which then counts, is 0 or None."""
        return self.data.get(field, default) in (None, 0)

    @property
    def num_layers(self) -> int:
        """Number of layers."""
        return self.size(self.key("block_count"), LIMITS["num_layers"])

    @property
    def hidden_size(self) -> int:
        """Width of the residual stream."""
        return self.size(self.key("embedding_length"), LIMITS["hidden_size"])

    @property
    def max_context(self) -> int:
        """Most tokens that the model was made for."""
        return stretched_context(self, self.name, self.size(self.key("context_length"), LIMITS["max_context"]))

    @property
    def names(self) -> Names:
        """Names of the tensors. A file may hold queries, keys and values in one."""
        if "blk.0.attn_qkv.weight" not in self.shapes:
            return GGUF_NAMES
        return replace(GGUF_NAMES, joined={"qkv": ("q", "k", "v")})

    @property
    def joined_feed_names(self) -> Names:
        """Names of the tensors where one holds gates above ups."""
        names = self.names
        roles = {**names.roles, "gate_up": names.roles["up"]}
        return replace(names, roles=roles, joined={**names.joined, "gate_up": ("gate", "up")})

    def sizes(self, short: str, limit: int) -> tuple[int, ...]:
        """Return a size of each layer, which the file gives as one number for all of them or as a list."""
        field, count = self.key(short), self.num_layers
        given = self.data.get(field)
        if not isinstance(given, list):
            return (self.size(field, limit),) * count
        if len(given) != count or not all(type(each) is int and 1 <= each <= limit for each in given):
            self.refuse(field, f"{count} integers from 1 to {limit}, one for each layer")
        return tuple(given)

    def attention(self, *, partly_rotated: bool = False, kv_heads: int | None = None, suffix: str = "") -> Attention:
        """Return full attention in the sizes of the metadata, with the biases for which the file has tensors.

        Args:
            partly_rotated: Whether the architecture may rotate a part of each head alone.
            kv_heads: Number of key heads, of an architecture whose layers may differ in it; None for the metadata's.
            suffix: End of the keys that give the size of a head, where some layers have keys of their own for that.
        """
        heads = self.size(self.key("attention.head_count"), LIMITS["num_heads"])
        kv_field, head_field = self.key("attention.head_count_kv"), self.key(f"attention.key_length{suffix}")
        attention = Attention(
            heads=heads,
            kv_heads=kv_heads or self.size(kv_field, LIMITS["num_kv_heads"], heads),
            head_dim=head_size(self, head_field, None, self.hidden_size, heads),
            qkv_bias="blk.0.attn_q.bias" in self.shapes or "blk.0.attn_qkv.bias" in self.shapes,
            o_bias="blk.0.attn_output.bias" in self.shapes,
        )
        for short in ("rope.dimension_count", "attention.value_length"):
            is_free, field = partly_rotated and short == "rope.dimension_count", self.key(short + suffix)
            if not is_free and self.data.get(field, attention.head_dim) != attention.head_dim:
                self.refuse(field, f"the head size, {attention.head_dim}")
        if partly_rotated:
            attention = replace(attention, rotary_dim=self._rotary_dim(attention.head_dim))
        return check_heads(attention, self.origin, kv_field, head_field)

    def _rotary_dim(self, head_dim: int) -> int | None:
        field = self.key("rope.dimension_count")
        rotary_dim = self.size(field, head_dim, head_dim)
        if rotary_dim % 2:
            self.refuse(field, f"an even number up to the head size, {head_dim}")
        return None if rotary_dim == head_dim else rotary_dim

    def dense(self) -> DenseFeed:
        """Return a gated feed, with the biases for which the file has tensors."""
        return DenseFeed(self._feed_size, bias="blk.0.ffn_down.bias" in self.shapes)

    def ungated(self, activation: PlainActivation) -> PlainFeed:
        """Return a feed without a gate, with the biases for which the file has tensors; no key names an activation."""
        return PlainFeed(self._feed_size, "blk.0.ffn_down.bias" in self.shapes, activation)

    def norms(self, placement: Literal["pre", "post", "both"] = "pre") -> Norms:
        """Return RMS norms before or behind a layer's parts."""
        return Norms(self._epsilon(), placement=placement)

    def window(self, default: int | None = None) -> int | None:
        """Return the attention window, which is `default` where the key is absent, and None where it is 0."""
        field = self.key("attention.sliding_window")
        if self.lacks(field, default):
            return None
        return self.size(field, LIMITS["max_context"], default)

    def windows(self, window: int | None, period: int) -> tuple[int | None, ...]:
        """Return the window of each layer, by `attention.sliding_window_pattern`.

        Args:
            window: The window of the layers that have one.
            period: Period of the pattern where the file has none: in each period all layers but the last have a window.
                The file may have another period, or a bool for each layer.
        """
        field, count = self.key("attention.sliding_window_pattern"), self.num_layers
        given = self.data.get(field)
        if isinstance(given, list):
            if len(given) != count or not all(isinstance(each, bool) for each in given):
                self.refuse(field, f"{count} bools, one for each layer")
            windowed = [each is True for each in given]
        else:
            every = self.size(field, LIMITS["num_layers"], period)
            windowed = [(layer + 1) % every != 0 for layer in range(count)]
        return tuple(window if each else None for each in windowed)

    def rope(self, attention: Attention) -> Rope:
        """Return the rotary embedding of the file, for heads like those of `attention`."""
        return read_gguf_rope(self, self.name, self.rope_tensors, attention.rotated_dim // 2)

    def decoder(
        self, layers: LayerSpec | Iterable[LayerSpec], ropes: Sequence[Rope], names: Names | None = None
    ) -> DecoderSpec:
        """Return the spec of a model.

        Args:
            layers: The layers, or the one that all of them are like.
            ropes: The rotary embeddings that the layers refer to.
            names: Names of the tensors; None for `names`.
        """
        each = (layers,) * self.num_layers if isinstance(layers, LayerSpec) else tuple(layers)
        return DecoderSpec(
            architecture=self.architecture,
            layers=tuple(within(layer, self.max_context) for layer in each),
            ropes=tuple(ropes),
            hidden_size=self.hidden_size,
            vocab_size=self._vocabulary(),
            max_context=self.max_context,
            norm_eps=each[0].norms.epsilon,
            tied_head="output.weight" not in self.shapes,
            names=self.names if names is None else names,
        )

    @property
    def _feed_size(self) -> int:
        return self.size(self.key("feed_forward_length"), LIMITS["ffn_size"])

    def _epsilon(self) -> float:
        return self.real(self.key("attention.layer_norm_rms_epsilon"), 0.0, 1.0)

    def _vocabulary(self) -> int:
        """Return the rows of the embedding, the width of the logits; refuse a metadata key that says otherwise."""
        shape = self.shapes.get("token_embd.weight")
        if shape is None or len(shape) != 2 or not 1 <= shape[0] <= LIMITS["vocab_size"]:
            limit = f"two sizes, the first from 1 to {LIMITS['vocab_size']}"
            refuse(self.origin, "the shape of token_embd.weight", shape, limit)
        if self.data.get(self.key("vocab_size"), shape[0]) != shape[0]:
            self.refuse(self.key("vocab_size"), f"the rows of token_embd.weight, {shape[0]}")
        return shape[0]
