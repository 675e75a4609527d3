"""Derives the shape of a decoder from its config.json; never imports torch or reads weights.

One `DecoderSpec` describes every supported family, and one row of `FAMILIES` is all that a family adds. Options that
the decoder does not support are refused by name, so that every model that loads is computed correctly. gguf_spec.py
does the same for GGUF metadata. Next: checkpoint/gguf.py and checkpoint/safetensors.py read files,
checkpoint/weights.py fills the parameters that a spec calls for.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final, Literal

import numpy as np

from headrace.adapters.untrusted import Fields, read_object, refuse

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["FAMILIES", "LIMITS", "DecoderSpec", "Family", "Rope", "checked", "from_hf", "head_size", "read_hf_config"]

RopeKind = Literal["default", "linear", "llama3"]


@dataclass(frozen=True, slots=True)
class Rope:
    """Rotary embedding: how positions turn into angles. The two halves of a head are rotated against each other."""

    theta: float
    kind: RopeKind = "default"
    factor: float = 1.0
    """Factor by which `linear` and `llama3` stretch the longest wavelengths."""
    low_freq_factor: float = 1.0
    high_freq_factor: float = 1.0
    original_context: int = 0
    """Tokens of context that a `llama3` model was first trained with."""
    divisors: tuple[float, ...] | None = None
    """Divisor of each frequency, as GGUF files store `llama3`; applied after everything else."""

    def inverse_frequencies(self, head_dim: int) -> NDArray[np.float32]:
        """Return the radians per position for each pair of a head's elements, float32 [head_dim / 2]."""
        frequencies = self.theta ** -(np.arange(0, head_dim, 2, dtype=np.float64) / head_dim)
        if self.kind == "linear":
            frequencies = frequencies / self.factor
        elif self.kind == "llama3":
            turns = self.original_context * frequencies / (2 * math.pi)
            share = (turns - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor)
            kept = np.clip(share, 0.0, 1.0)
            frequencies = frequencies * (kept + (1 - kept) / self.factor)
        if self.divisors is not None:
            frequencies = frequencies / np.asarray(self.divisors, dtype=np.float64)
        return frequencies.astype(np.float32)


@dataclass(frozen=True, slots=True)
class DecoderSpec:
    """Shape of a decoder: everything that the network must know of a model, apart from its weights."""

    architecture: str
    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    ffn_size: int
    vocab_size: int
    max_context: int
    """Most tokens of a prompt and its completion together."""
    norm_eps: float
    rope: Rope
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    qk_norm: bool
    """Whether each query and key head is RMS-normalised before rotation."""
    tied_head: bool
    windows: tuple[int | None, ...]
    """Number of last positions that a token attends to, itself included, for each layer; None means all of them."""
    has_head: bool = True
    """Whether the model chooses tokens; without a head it only embeds, and `tied_head` is True."""
    checkpoint_dtype: str | None = None
    """Dtype `float32`, `bfloat16` or `float16` if the config names it; None for GGUF, whose tensors differ."""


_CONFIG_BYTES = 4 << 20
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
_DTYPES = ("float32", "bfloat16", "float16")


@dataclass(frozen=True, slots=True)
class Family:
    """Differences of one architecture from the common decoder: True, False, or the config field that decides."""

    model_type: str
    qkv_bias: bool | str = False
    o_bias: bool | str = False
    mlp_bias: bool | str = False
    qk_norm: bool = False
    windows: Literal["none", "all", "late"] = "none"
    default_window: int | None = None
    default_kv_heads: int | None = None
    default_head_dim: int | None = None


FAMILIES = {
    "LlamaForCausalLM": Family("llama", qkv_bias="attention_bias", o_bias="attention_bias", mlp_bias="mlp_bias"),
    "MistralForCausalLM": Family("mistral", windows="all", default_window=4096, default_kv_heads=8),
    "Qwen2ForCausalLM": Family("qwen2", qkv_bias=True, windows="late", default_window=4096),
    "Qwen3ForCausalLM": Family(
        "qwen3",
        qkv_bias="attention_bias",
        o_bias="attention_bias",
        qk_norm=True,
        windows="late",
        default_window=4096,
        default_head_dim=128,
    ),
}

_HEADLESS = {name.replace("ForCausalLM", "Model"): row for name, row in FAMILIES.items()}

# Fields of other families that change the arithmetic, with the values under which they change nothing.
_NEUTRAL: dict[str, tuple[object, ...]] = {
    "alibi": (None, False),
    "attention_chunk_size": (None,),
    "attention_multiplier": (None,),
    "attn_logit_softcapping": (None,),
    "attn_temperature_tuning": (None, False),
    "clip_qkv": (None,),
    "compression_config": (None,),
    "cross_attention_layers": (None,),
    "embedding_multiplier": (None, 1),
    "final_logit_softcapping": (None,),
    "is_causal": (None, True),
    "is_encoder_decoder": (None, False),
    "logit_scale": (None, 1),
    "logits_scaling": (None, 1),
    "no_rope_layers": (None,),
    "num_experts": (None, 0),
    "num_local_experts": (None, 0),
    "parallel_attn": (None, False),
    "partial_rotary_factor": (None, 1),
    "qk_layernorm": (None, False),
    "query_pre_attn_scalar": (None,),
    "residual_multiplier": (None, 1),
    "rope_interleaved": (None, False),
    "rotary_pct": (None, 1),
    "text_config": (None,),
    "use_bidirectional_attention": (None, False),
    "use_mrope": (None, False),
    "use_qk_norm": (None, False),
    "vision_config": (None,),
}


def read_hf_config(folder: Path) -> dict[str, object]:
    """Return `config.json` of a Hugging Face folder, at most 4 MiB of it.

    Raises:
        ModelRejected: The file is missing, too long, or not an unambiguous JSON object.
    """
    return read_object(folder / "config.json", _CONFIG_BYTES)


def from_hf(config: Mapping[str, object], origin: str = "config.json") -> DecoderSpec:
    """Return the spec of a model from its Hugging Face `config.json`.

    Args:
        config: The parsed file; both `rope_theta`/`rope_scaling` and `rope_parameters` are understood.
        origin: The file's base name, for messages.

    Raises:
        ModelRejected: The architecture is not supported, a size is impossible, or a field asks for what the decoder
            does not compute; the error has the field, its value and what is supported.
    """
    fields = Fields(config, origin)
    architecture, row = _row(fields)
    has_head = architecture in FAMILIES
    for field, neutral in _NEUTRAL.items():
        if not any(config.get(field) is value or config.get(field) == value for value in neutral):
            fields.refuse(field, " or ".join(repr(value) for value in neutral))
    if not _quantises_nothing_but_kv(config.get("quantization_config")):
        fields.refuse(
            "quantization_config",
            "none, or a kv_cache_scheme of 8-bit floats alone; quantised weights run from GGUF files",
        )
    if config.get("hidden_act", "silu") not in ("silu", "swish"):
        fields.refuse("hidden_act", "silu")
    layers = fields.size("num_hidden_layers", LIMITS["num_layers"])
    heads = fields.size("num_attention_heads", LIMITS["num_heads"])
    hidden = fields.size("hidden_size", LIMITS["hidden_size"])
    context = fields.size("max_position_embeddings", LIMITS["max_context"])
    spec = DecoderSpec(
        architecture=architecture,
        num_layers=layers,
        hidden_size=hidden,
        num_heads=heads,
        num_kv_heads=fields.size("num_key_value_heads", LIMITS["num_kv_heads"], row.default_kv_heads or heads),
        head_dim=head_size(fields, "head_dim", row.default_head_dim, hidden, heads),
        ffn_size=fields.size("intermediate_size", LIMITS["ffn_size"]),
        vocab_size=fields.size("vocab_size", LIMITS["vocab_size"]),
        max_context=context,
        norm_eps=fields.real("rms_norm_eps", 0.0, 1.0, 1e-6),
        rope=_hf_rope(fields, context),
        qkv_bias=fields.chosen(row.qkv_bias),
        o_bias=fields.chosen(row.o_bias),
        mlp_bias=fields.chosen(row.mlp_bias),
        qk_norm=row.qk_norm,
        tied_head=fields.flag("tie_word_embeddings", False) or not has_head,
        windows=_hf_windows(fields, row, layers, context),
        has_head=has_head,
        checkpoint_dtype=_hf_dtype(fields),
    )
    return checked(spec, origin, "num_key_value_heads", "head_dim")


def _row(fields: Fields) -> tuple[str, Family]:
    """Return the table row for the config's one architecture, by `architectures` or else `model_type`."""
    if fields.data.get("auto_map") is not None:
        fields.refuse("auto_map", "models that need no code of their own")
    named = fields.data.get("architectures")
    if named is None:
        for architecture, row in FAMILIES.items():
            if fields.data.get("model_type") == row.model_type:
                return architecture, row
        fields.refuse("model_type", ", ".join(row.model_type for row in FAMILIES.values()))
    rows = FAMILIES | _HEADLESS
    if not isinstance(named, list) or len(named) != 1 or not isinstance(named[0], str) or named[0] not in rows:
        fields.refuse("architectures", ", ".join(rows))
    row = rows[named[0]]
    if fields.data.get("model_type", row.model_type) != row.model_type:
        fields.refuse("model_type", row.model_type)
    return named[0], row


def head_size(fields: Fields, field: str, default: int | None, hidden: int, heads: int) -> int:
    """Return the size of a head: from `field`, by default, or the hidden size shared out evenly."""
    if fields.data.get(field) is None and default is None and hidden % heads:
        refuse(fields.origin, "hidden_size", hidden, f"a multiple of the {heads} attention heads")
    return fields.size(field, LIMITS["head_dim"], default or hidden // heads)


def _quantises_nothing_but_kv(quantization: object) -> bool:
    """Return whether weights are unquantised; scales of an 8-bit cache may come with them."""
    if quantization is None:
        return True
    if not isinstance(quantization, Mapping) or quantization.get("quant_method") != "compressed-tensors":
        return False
    scheme = quantization.get("kv_cache_scheme")
    is_fp8 = isinstance(scheme, Mapping) and (scheme.get("num_bits"), scheme.get("type")) == (8, "float")
    return is_fp8 and not quantization.get("config_groups")


def _hf_dtype(fields: Fields) -> str | None:
    field = "dtype" if fields.data.get("dtype") is not None else "torch_dtype"
    value = fields.data.get(field)
    if value is not None and value not in _DTYPES:
        fields.refuse(field, ", ".join(_DTYPES))
    return str(value) if value is not None else None


def _hf_rope(fields: Fields, context: int) -> Rope:
    """Read transformers 5's `rope_parameters`, or the older `rope_theta` beside `rope_scaling`."""
    field = "rope_parameters" if fields.data.get("rope_parameters") is not None else "rope_scaling"
    given = fields.data.get(field)
    if given is None:
        given = {}
    if not isinstance(given, Mapping):
        fields.refuse(field, "an object with rope_type")
    rope = Fields({"rope_theta": fields.data.get("rope_theta"), **given}, f"{fields.origin}: {field}")
    kind = given.get("rope_type", given.get("type", "default"))
    theta = rope.real("rope_theta", 1.0, 1e12, 10000.0)
    if given.get("partial_rotary_factor", 1) != 1:
        rope.refuse("partial_rotary_factor", 1)
    if kind == "default":
        return Rope(theta)
    if kind == "linear":
        return Rope(theta, "linear", factor=rope.real("factor", 1.0, 1e6))
    if kind != "llama3":
        refuse(rope.origin, "rope_type", kind, "default, linear, llama3")
    low = rope.real("low_freq_factor", 1e-6, 1e6)
    high = rope.real("high_freq_factor", 1e-6, 1e6)
    if high <= low:
        rope.refuse("high_freq_factor", f"more than low_freq_factor, which is {low:g}")
    original = rope.size("original_max_position_embeddings", LIMITS["max_context"], context)
    return Rope(theta, "llama3", rope.real("factor", 1.0, 1e6), low, high, original)


def _hf_windows(fields: Fields, row: Family, layers: int, context: int) -> tuple[int | None, ...]:
    """Return each layer's window: none (Llama), the same everywhere (Mistral), or on the later layers (Qwen)."""
    window = None
    if row.windows == "all" or (row.windows == "late" and fields.flag("use_sliding_window", False)):
        if fields.data.get("sliding_window", row.default_window) is not None:
            window = fields.size("sliding_window", LIMITS["max_context"], row.default_window)
    first = 0
    if window is not None and row.windows == "late":
        first = fields.data.get("max_window_layers", 28)  # type: ignore[assignment]  # checked on the next line
        if isinstance(first, bool) or not isinstance(first, int) or first < 0:
            fields.refuse("max_window_layers", "an integer of at least 0")
    windowed = [window is not None and layer >= first for layer in range(layers)]
    types = fields.data.get("layer_types")
    if types is not None:
        windowed = _windowed_by_type(fields, types, windowed, row)
    # A window as long as the context limits nothing.
    effective = window if window is not None and window < context else None
    return tuple(effective if is_windowed else None for is_windowed in windowed)


def _windowed_by_type(fields: Fields, types: object, windowed: list[bool], row: Family) -> list[bool]:
    kinds = ("full_attention", "sliding_attention")
    if not isinstance(types, list) or len(types) != len(windowed) or any(kind not in kinds for kind in types):
        fields.refuse("layer_types", f"{len(windowed)} entries, each one of {', '.join(kinds)}")
    by_type = [kind == "sliding_attention" for kind in types]
    if by_type != windowed and (row.windows != "late" or not any(windowed)):
        fields.refuse("layer_types", "what sliding_window and use_sliding_window say")
    return by_type


def checked(spec: DecoderSpec, origin: str, kv_field: str, head_field: str) -> DecoderSpec:
    """Return `spec` once its sizes agree with each other."""
    if spec.num_heads % spec.num_kv_heads:
        refuse(origin, kv_field, spec.num_kv_heads, f"a divisor of the {spec.num_heads} attention heads")
    if spec.head_dim % 2:
        refuse(origin, head_field, spec.head_dim, "an even head size")
    return spec
