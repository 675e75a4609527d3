"""`GgufHeader`: shared reading of a GGUF file's metadata and tensor shapes; families call it, it knows none of them.

checkpoint/gguf.py reads the weights.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from headrace.adapters.untrusted import Fields, refuse
from headrace.engine.model.families.sizes import check_heads, head_size
from headrace.engine.model.roles import Names
from headrace.engine.model.rope import Divided, Linear, Rope
from headrace.engine.model.spec import LIMITS, Attention, DecoderSpec, DenseFeed, LayerSpec, Norms

__all__ = ["GGUF_NAMES", "GgufHeader"]

# Keys by which a GGUF file may describe its architecture; any other under `<architecture>.` would be ignored.
_IGNORED: Final = frozenset(
    (
        "vocab_size",
        "rope.dimension_count",
        "rope.scaling.finetuned",
        "rope.scaling.original_context_length",
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
        "attention.sliding_window",
        "rope.freq_base",
        "rope.scaling.type",
        "rope.scaling.factor",
    )
)
_NEUTRAL: Final[dict[str, tuple[object, ...]]] = {
    "attention.causal": (True,),
    "attention.scale": (0.0,),
    "attention.max_alibi_bias": (0.0,),
    "attention.clamp_kqv": (0.0,),
    "expert_count": (0,),
    "expert_used_count": (0,),
    "rope.scaling.attn_factor": (1.0,),
    "use_parallel_residual": (False,),
}

GGUF_NAMES = Names(
    layer_prefix="blk.{}.",
    roles={
        "embedding": "token_embd",
        "final_norm": "output_norm",
        "head": "output",
        "mixer_norm": "attn_norm",
        "q": "attn_q",
        "k": "attn_k",
        "v": "attn_v",
        "o": "attn_output",
        "q_norm": "attn_q_norm",
        "k_norm": "attn_k_norm",
        "feed_norm": "ffn_norm",
        "gate": "ffn_gate",
        "up": "ffn_up",
        "down": "ffn_down",
    },
    # GgufFile.spec() has put the tensor into the spec.
    harmless=re.compile(r"rope_freqs\.weight"),
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
    rope_divisors: tuple[float, ...] | None
    """The tensor `rope_freqs.weight`, where the file has one."""

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
        return self.size(self.key("context_length"), LIMITS["max_context"])

    def attention(self) -> Attention:
        """Return full attention in the sizes of the metadata, with the biases for which the file has tensors."""
        heads = self.size(self.key("attention.head_count"), LIMITS["num_heads"])
        kv_field, head_field = self.key("attention.head_count_kv"), self.key("attention.key_length")
        attention = Attention(
            heads=heads,
            kv_heads=self.size(kv_field, LIMITS["num_kv_heads"], heads),
            head_dim=head_size(self, head_field, None, self.hidden_size, heads),
            qkv_bias="blk.0.attn_q.bias" in self.shapes,
            o_bias="blk.0.attn_output.bias" in self.shapes,
        )
        for short in ("rope.dimension_count", "attention.value_length"):
            if self.data.get(self.key(short), attention.head_dim) != attention.head_dim:
                self.refuse(self.key(short), f"the head size, {attention.head_dim}")
        pairs = attention.head_dim // 2
        if self.rope_divisors is not None and len(self.rope_divisors) != pairs:
            refuse(self.origin, "the length of rope_freqs.weight", len(self.rope_divisors), pairs)
        return check_heads(attention, self.origin, kv_field, head_field)

    def dense(self) -> DenseFeed:
        """Return a gated feed, with the biases for which the file has tensors."""
        size = self.size(self.key("feed_forward_length"), LIMITS["ffn_size"])
        return DenseFeed(size, bias="blk.0.ffn_gate.bias" in self.shapes)

    def norms(self) -> Norms:
        """Return RMS norms before each part of a layer."""
        return Norms(self._epsilon())

    def window(self) -> int | None:
        """Return the attention window; None where the file gives none or 0, or it is as long as the context."""
        field = self.key("attention.sliding_window")
        if not self.data.get(field):
            return None
        window = self.size(field, LIMITS["max_context"])
        return window if window < self.max_context else None

    def refuse_window(self) -> None:
        """Refuse a window: files of some architectures do not say which layers have it."""
        field = self.key("attention.sliding_window")
        if self.data.get(field):
            self.refuse(field, "none for this architecture")

    def decoder(self, layer: LayerSpec, names: Names = GGUF_NAMES) -> DecoderSpec:
        """Return the spec of a model whose layers are all `layer`."""
        return DecoderSpec(
            architecture=self.architecture,
            layers=(layer,) * self.num_layers,
            ropes=(self._rope(),),
            hidden_size=self.hidden_size,
            vocab_size=self._vocabulary(),
            max_context=self.max_context,
            norm_eps=self._epsilon(),
            tied_head="output.weight" not in self.shapes,
            names=names,
        )

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

    def _rope(self) -> Rope:
        divisors = self.rope_divisors
        if divisors is not None and not all(math.isfinite(divisor) and divisor > 0 for divisor in divisors):
            refuse(self.origin, "rope_freqs.weight", divisors, "positive numbers")
        theta = self.real(self.key("rope.freq_base"), 1.0, 1e12, 10000.0)
        kind = self.data.get(self.key("rope.scaling.type"), "none")
        if kind == "linear":
            factor = self.real(self.key("rope.scaling.factor"), 1.0, 1e6)
            return Rope(theta, Divided(divisors, Linear(factor)) if divisors else Linear(factor))
        if kind != "none":
            self.refuse(self.key("rope.scaling.type"), "none, linear")
        return Rope(theta, Divided(divisors) if divisors else None)
