"""Derives the shape of the decoder in a GGUF file from its metadata and tensor shapes; never reads a weight itself."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from headrace.adapters.untrusted import Fields, refuse
from headrace.engine.model.spec import FAMILIES, LIMITS, DecoderSpec, Rope, checked, head_size

__all__ = ["from_gguf"]

# Keys by which a GGUF file may describe its architecture; any other under `<architecture>.` would be ignored.
_GGUF_IGNORED = frozenset(
    (
        "vocab_size",
        "rope.dimension_count",
        "rope.scaling.finetuned",
        "rope.scaling.original_context_length",
        "attention.value_length",
        "tensor_data_layout",
    )
)
_GGUF_USED = frozenset(
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
_GGUF_NEUTRAL: dict[str, tuple[object, ...]] = {
    "attention.causal": (True,),
    "attention.scale": (0.0,),
    "attention.max_alibi_bias": (0.0,),
    "attention.clamp_kqv": (0.0,),
    "expert_count": (0,),
    "expert_used_count": (0,),
    "rope.scaling.attn_factor": (1.0,),
    "use_parallel_residual": (False,),
}
_GGUF_ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}


def from_gguf(
    metadata: Mapping[str, object],
    shapes: Mapping[str, Sequence[int]],
    rope_divisors: tuple[float, ...] | None = None,
    origin: str = "the GGUF file",
) -> DecoderSpec:
    """Return the spec of a model from a GGUF file's metadata.

    Args:
        metadata: Keys to plain Python values.
        shapes: Tensor names to shapes, outer size first: they decide what the metadata leaves open (a tied head,
            biases, the vocabulary).
        rope_divisors: The tensor `rope_freqs.weight`, where the file has one.
        origin: The file's base name, for messages.

    Raises:
        ModelRejected: The same errors as from `from_hf`.
    """
    name = metadata.get("general.architecture")
    if not isinstance(name, str) or name not in _GGUF_ARCHITECTURES:
        refuse(origin, "general.architecture", name, ", ".join(_GGUF_ARCHITECTURES))
    fields = Fields(metadata, origin)
    row = FAMILIES[_GGUF_ARCHITECTURES[name]]
    _refuse_unheeded(fields, f"{name}.")
    layers = fields.size(f"{name}.block_count", LIMITS["num_layers"])
    hidden = fields.size(f"{name}.embedding_length", LIMITS["hidden_size"])
    heads = fields.size(f"{name}.attention.head_count", LIMITS["num_heads"])
    context = fields.size(f"{name}.context_length", LIMITS["max_context"])
    window = None
    if metadata.get(f"{name}.attention.sliding_window"):
        # Only the llama architecture has one window for all layers; the others do not say which layers have it.
        if row.windows != "none":
            fields.refuse(f"{name}.attention.sliding_window", "none for this architecture")
        window = fields.size(f"{name}.attention.sliding_window", LIMITS["max_context"])
    spec = DecoderSpec(
        architecture=_GGUF_ARCHITECTURES[name],
        num_layers=layers,
        hidden_size=hidden,
        num_heads=heads,
        num_kv_heads=fields.size(f"{name}.attention.head_count_kv", LIMITS["num_kv_heads"], heads),
        head_dim=head_size(fields, f"{name}.attention.key_length", None, hidden, heads),
        ffn_size=fields.size(f"{name}.feed_forward_length", LIMITS["ffn_size"]),
        vocab_size=_gguf_vocabulary(fields, name, shapes),
        max_context=context,
        norm_eps=fields.real(f"{name}.attention.layer_norm_rms_epsilon", 0.0, 1.0),
        rope=_gguf_rope(fields, name, rope_divisors),
        qkv_bias="blk.0.attn_q.bias" in shapes,
        o_bias="blk.0.attn_output.bias" in shapes,
        mlp_bias="blk.0.ffn_gate.bias" in shapes,
        qk_norm=row.qk_norm,
        tied_head="output.weight" not in shapes,
        windows=(window if window is not None and window < context else None,) * layers,
    )
    for key in ("rope.dimension_count", "attention.value_length"):
        if metadata.get(f"{name}.{key}", spec.head_dim) != spec.head_dim:
            fields.refuse(f"{name}.{key}", f"the head size, {spec.head_dim}")
    if rope_divisors is not None and len(rope_divisors) != spec.head_dim // 2:
        refuse(origin, "the length of rope_freqs.weight", len(rope_divisors), spec.head_dim // 2)
    return checked(spec, origin, f"{name}.attention.head_count_kv", f"{name}.attention.key_length")


def _refuse_unheeded(fields: Fields, prefix: str) -> None:
    for key, value in fields.data.items():
        short = key.removeprefix(prefix)
        if short == key or short in _GGUF_IGNORED or short in _GGUF_USED:
            continue
        if short not in _GGUF_NEUTRAL or value not in _GGUF_NEUTRAL[short]:
            fields.refuse(key, _GGUF_NEUTRAL.get(short, ("models without this key",))[0])
    if fields.data.get("split.count") not in (None, 0, 1):
        fields.refuse("split.count", "one file")


def _gguf_vocabulary(fields: Fields, name: str, shapes: Mapping[str, Sequence[int]]) -> int:
    """Return the rows of the embedding, the width of the logits; refuse a metadata key that says otherwise."""
    shape = shapes.get("token_embd.weight")
    if shape is None or len(shape) != 2 or not 1 <= shape[0] <= LIMITS["vocab_size"]:
        limit = f"two sizes, the first from 1 to {LIMITS['vocab_size']}"
        refuse(fields.origin, "the shape of token_embd.weight", shape, limit)
    if fields.data.get(f"{name}.vocab_size", shape[0]) != shape[0]:
        fields.refuse(f"{name}.vocab_size", f"the rows of token_embd.weight, {shape[0]}")
    return shape[0]


def _gguf_rope(fields: Fields, name: str, divisors: tuple[float, ...] | None) -> Rope:
    if divisors is not None and not all(math.isfinite(divisor) and divisor > 0 for divisor in divisors):
        refuse(fields.origin, "rope_freqs.weight", divisors, "positive numbers")
    theta = fields.real(f"{name}.rope.freq_base", 1.0, 1e12, 10000.0)
    kind = fields.data.get(f"{name}.rope.scaling.type", "none")
    if kind == "linear":
        return Rope(theta, "linear", fields.real(f"{name}.rope.scaling.factor", 1.0, 1e6), divisors=divisors)
    if kind != "none":
        fields.refuse(f"{name}.rope.scaling.type", "none, linear")
    return Rope(theta, divisors=divisors)
