"""`HfConfig`: shared reading of a Hugging Face config.json; families call it, and it knows none of them."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final, Literal, NoReturn

from headrace.adapters.untrusted import Fields, refuse
from headrace.engine.model.families.hf_rope import PART, read_rope, rope_fields
from headrace.engine.model.families.sizes import check_heads, head_size, within
from headrace.engine.model.families.unread import FieldsRead, refuse_unread
from headrace.engine.model.roles import Names
from headrace.engine.model.rope import Rope, Yarn
from headrace.engine.model.spec import LIMITS, Attention, DecoderSpec, DenseFeed, LayerSpec, Norms

__all__ = ["HF_NAMES", "HfConfig"]

_DTYPES = ("float32", "bfloat16", "float16")

_OTHER_MODULE: Final = '; model_impl="transformers" computes what the module of that library knows'
# Fields of other families that change the arithmetic, with the values under which they change nothing.
_NEUTRAL: Final[dict[str, tuple[object, ...]]] = {
    "add_cross_attention": (None, False),
    "alibi": (None, False),
    "attention_chunk_size": (None,),
    "attention_k_eq_v": (None, False),
    "attention_multiplier": (None,),
    "attn_logit_softcapping": (None,),
    "attn_temperature_tuning": (None, False),
    "clip_qkv": (None,),
    "compression_config": (None,),
    "cross_attention_layers": (None,),
    "embedding_multiplier": (None, 1),
    "enable_moe_block": (None, False),
    "final_logit_softcapping": (None,),
    "hidden_size_per_layer_input": (None, 0),
    "kv_lora_rank": (None,),
    "is_causal": (None, True),
    "is_encoder_decoder": (None, False),
    "logit_scale": (None, 1),
    "logits_scaling": (None, 1),
    "new_decoder_architecture": (None, False),
    "no_rope_layers": (None,),
    "moe_num_experts": (None, 0),
    "n_routed_experts": (None, 0),
    "num_experts": (None, 0),
    "num_kv_shared_layers": (None, 0),
    "num_local_experts": (None, 0),
    "parallel_attn": (None, False),
    "partial_rotary_factor": (None, 1),
    "per_layer_config": (None, {}),
    "qk_layernorm": (None, False),
    "query_pre_attn_scalar": (None,),
    "residual_multiplier": (None, 1),
    "rope_interleaved": (None, False),
    "rotary_pct": (None, 1),
    "scale_attn_by_inverse_layer_idx": (None, False),
    "text_config": (None,),
    "use_bidirectional_attention": (None, False),
    "use_mrope": (None, False),
    "use_parallel_residual": (None, False),
    "use_qk_norm": (None, False),
    "vision_config": (None,),
}

HF_NAMES = Names(
    layer_prefix="model.layers.{}.",
    roles={
        "embedding": "model.embed_tokens",
        "final_norm": "model.norm",
        "head": "lm_head",
        "mixer_norm": "input_layernorm",
        "q": "self_attn.q_proj",
        "k": "self_attn.k_proj",
        "v": "self_attn.v_proj",
        "o": "self_attn.o_proj",
        "q_norm": "self_attn.q_norm",
        "k_norm": "self_attn.k_norm",
        "feed_norm": "post_attention_layernorm",
        "gate": "mlp.gate_proj",
        "up": "mlp.up_proj",
        "down": "mlp.down_proj",
    },
    harmless=re.compile(r"(model\.)?(layers\.\d+\.self_attn\.)?rotary_emb\.inv_freq"),
    kv_scales=(
        "self_attn.{0}_scale",
        "self_attn.{0}_proj.{0}_scale",
        "self_attn.attn.{0}_scale",
        "self_attn.{0}_proj.output_scale",
    ),  # fmt: skip
)
"""Names that Llama's classes in transformers give to the roles, and those of most families after it."""


@dataclass(frozen=True, slots=True)
class HfConfig(Fields):
    """A config.json of one architecture. Every method refuses a value that is not supported, by its field's name."""

    data: FieldsRead
    """The fields, which remember that they were read: `check_read` refuses the others."""
    architecture: str
    has_head: bool
    """Whether the architecture has an output head."""
    spelling: Mapping[str, str] = field(default_factory=dict)
    """Fields that this config names in another way than most, by their usual names."""

    def spelled(self, spelling: Mapping[str, str], defaults: Mapping[str, object] | None = None) -> HfConfig:
        """Return the config with values under their usual names too, and with `defaults`; messages keep its own names.

        Args:
            spelling: Names in this config, by the usual ones.
            defaults: Values of fields that are absent or null, by their usual names.
        """
        renamed = {usual: self.data[own] for usual, own in spelling.items() if self.data.get(own) is not None}
        given = self.data.changed(renamed)
        missing = {name: value for name, value in (defaults or {}).items() if given.get(name) is None}
        return replace(self, data=given.changed(missing), spelling=spelling)

    def refuse(self, field: str, limit: object) -> NoReturn:
        """Refuse the value of `field`, under the name that it has in this config."""
        refuse(self.origin, self._own(field), self.data.get(field), limit)

    def check(self, heeded: Iterable[str] = ()) -> None:
        """Refuse fields that change the arithmetic of other families, but those in `heeded`, which the family reads."""
        for name, neutral in _NEUTRAL.items():
            value = self.data.get(name)
            if name not in heeded and not any(value is allowed or value == allowed for allowed in neutral):
                values = " or ".join(map(json.dumps, neutral))
                self.refuse(name, f"{values}, since {self.architecture} is computed without it")
        # What it says is read with the weights: checkpoint/quantised/reader.py.
        if not isinstance(self.data.get("quantization_config"), (Mapping, type(None))):
            self.refuse("quantization_config", "an object")

    def expect(self, field: str, *values: str | float) -> object:
        """Return a field, the first of `values` where it is absent or null; refuse one that is none of them."""
        found = self.data.get(field)
        if found is None:
            return values[0]
        if not any(isinstance(found, bool) is isinstance(value, bool) and found == value for value in values):
            self.refuse(field, " or ".join(map(repr, values)))
        return found

    def check_read(self, unread: Iterable[str] = ()) -> None:
        """Refuse fields that nothing has read, once all has been read, but those in `unread` and harmless ones."""
        read = self.data.looked_up.union(unread)
        refuse_unread(self.data, read, self.origin, self.architecture, _OTHER_MODULE)

    @property
    def num_layers(self) -> int:
        """Number of layers."""
        return self.size("num_hidden_layers", LIMITS["num_layers"])

    @property
    def hidden_size(self) -> int:
        """Width of the residual stream."""
        return self.size("hidden_size", LIMITS["hidden_size"])

    @property
    def max_context(self) -> int:
        """Most tokens that the model was made for."""
        return self.size("max_position_embeddings", LIMITS["max_context"])

    def attention(self, *, kv_heads: int | None = None, head_dim: int | None = None) -> Attention:
        """Return full attention without biases or norms of heads, in the sizes that the config gives.

        Args:
            kv_heads: Number of key heads where the config gives none; None for as many as query heads.
            head_dim: Size of a head where the config gives none; None for the hidden size shared out evenly.
        """
        heads = self.size("num_attention_heads", LIMITS["num_heads"])
        attention = Attention(
            heads=heads,
            kv_heads=self.size("num_key_value_heads", LIMITS["num_kv_heads"], kv_heads or heads),
            head_dim=head_size(self, "head_dim", head_dim, self.hidden_size, heads, self._own("hidden_size")),
        )
        return check_heads(attention, self.origin, self._own("num_key_value_heads"), "head_dim")

    def dense(self) -> DenseFeed:
        """Return a gated feed without biases."""
        if self.data.get("hidden_act", "silu") not in ("silu", "swish"):
            self.refuse("hidden_act", "silu")
        return DenseFeed(self.size("intermediate_size", LIMITS["ffn_size"]))

    def norms(self, default_epsilon: float = 1e-6, *, placement: Literal["pre", "post", "both"] = "pre") -> Norms:
        """Return RMS norms before or behind a layer's parts, with `default_epsilon` where the config gives none."""
        return Norms(self.real("rms_norm_eps", 0.0, 1.0, default_epsilon), placement=placement)

    def window(self, default: int | None) -> int | None:
        """Return the field `sliding_window`, which is `default` where it is absent, and None where it is null."""
        if self.data.get("sliding_window", default) is None:
            return None
        return self.size("sliding_window", LIMITS["max_context"], default)

    def windows(
        self, window: int | None = None, has_window: Sequence[bool] | None = None, *, types_decide: bool = False
    ) -> tuple[int | None, ...]:
        """Return the window of each layer: `window` in the layers of which `has_window` is True, and None in others.

        `has_window` may be left out where all layers have it. `layer_types` must say the same, unless `types_decide`
        and there is a window.
        """
        windowed = [window is not None and each for each in has_window or [True] * self.num_layers]
        types = self.data.get("layer_types")
        if types is not None:
            by_type = self._windowed_by_type(types, len(windowed))
            if by_type != windowed and not (types_decide and any(windowed)):
                self.refuse("layer_types", "what sliding_window and use_sliding_window say")
            windowed = by_type
        return tuple(window if is_windowed else None for is_windowed in windowed)

    def rope(
        self,
        attention: Attention,
        default_theta: float = 10000.0,
        layer_type: str | None = None,
        *,
        own: Collection[str] = (),
    ) -> Rope:
        """Return the rotary embedding of the config.

        Args:
            attention: Attention with the heads that are rotated.
            default_theta: Base of the frequencies where the config gives none.
            layer_type: Entry of `layer_types` whose rope is wanted, where a config may have several.
            own: Fields of the rope's object that the family reads, and that are refused in others.
        """
        return read_rope(self, self.max_context, attention, default_theta, layer_type, own)

    def partly_rotated(self, attention: Attention, default: float = 1.0) -> Attention:
        """Return attention that rotates a part of each head alone, as large as `partial_rotary_factor` says.

        Args:
            attention: Attention with the heads.
            default: The part where the config gives none.
        """
        name, rope = rope_fields(self)
        inside = rope.get(PART) is not None
        fields = Fields(rope, f"{self.origin}: {name}") if inside else self
        rotary_dim = int(attention.head_dim * fields.real(PART, 0.0, 1.0, default))
        if rotary_dim < 2 or rotary_dim % 2:
            fields.refuse(PART, f"an even part of the {attention.head_dim} elements of a head")
        return replace(attention, rotary_dim=rotary_dim if rotary_dim < attention.head_dim else None)

    def has_rope_of(self, layer_type: str) -> bool:
        """Return whether the config has a rope of its own for an entry of `layer_types`."""
        given = self.data.get("rope_parameters")
        return isinstance(given, Mapping) and isinstance(given.get(layer_type), Mapping)

    def decoder(
        self, layers: Iterable[LayerSpec], ropes: Sequence[Rope], names: Names = HF_NAMES, *, is_tied: bool = False
    ) -> DecoderSpec:
        """Return the spec of a model with these layers, an embedding, a final norm like theirs and a head.

        Args:
            layers: The layers.
            ropes: The rotary embeddings that the layers refer to.
            names: Names of the tensors.
            is_tied: Whether the head is the embedding where the config does not say.
        """
        context = max(self._stretched(rope) for rope in ropes)
        layers = tuple(within(layer, context) for layer in layers)
        return DecoderSpec(
            architecture=self.architecture,
            layers=layers,
            ropes=tuple(ropes),
            hidden_size=self.hidden_size,
            vocab_size=self.size("vocab_size", LIMITS["vocab_size"]),
            max_context=context,
            norm_eps=layers[0].norms.epsilon,
            tied_head=self.flag("tie_word_embeddings", is_tied) or not self.has_head,
            names=names,
            has_head=self.has_head,
            checkpoint_dtype=self.dtype,
        )

    def _own(self, field: str) -> str:
        """Return the name that this config has for a field."""
        return self.spelling.get(field, field)

    def _stretched(self, rope: Rope) -> int:
        """Return the most tokens of a model with a rope; by custom the config leaves out what yarn adds to them."""
        yarn = rope.scaling
        stretched = round(yarn.factor * yarn.original_context) if isinstance(yarn, Yarn) else 0
        return min(max(self.max_context, stretched), LIMITS["max_context"])

    def _windowed_by_type(self, types: object, layers: int) -> list[bool]:
        kinds = ("full_attention", "sliding_attention")
        if not isinstance(types, list) or len(types) != layers or any(kind not in kinds for kind in types):
            self.refuse("layer_types", f"{layers} entries, each one of {', '.join(kinds)}")
        return [kind == "sliding_attention" for kind in types]

    @property
    def dtype(self) -> str | None:
        """Dtype of the checkpoint's weights, by either name of the field; None where the config gives none."""
        name = "dtype" if self.data.get("dtype") is not None else "torch_dtype"
        value = self.data.get(name)
        if value is not None and value not in _DTYPES:
            self.refuse(name, ", ".join(_DTYPES))
        return str(value) if value is not None else None
