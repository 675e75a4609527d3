"""Gemma 2: norms on both sides of mixer and feed, windows in every other layer, GELU, and bounded scores and logits.

Gemma Team (2024), "Gemma 2: Improving open language models at a practical size". Checkpoints hold the weights of norms
less 1, and scores have a factor that the size of a head does not decide.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, replace

import numpy as np

from headrace.engine.model.families.family import Family
from headrace.engine.model.families.gguf import GgufHeader
from headrace.engine.model.families.hf import HF_NAMES, HfConfig
from headrace.engine.model.rope import Rope
from headrace.engine.model.spec import LIMITS, Attention, DecoderSpec, DenseFeed, LayerSpec, SoftcappedAttention

__all__ = [
    "GEMMA2",
    "GEMMA_NAMES",
    "cap_of",
    "embedding_scale",
    "gemma_attention",
    "gemma_feed",
    "in_gguf",
    "rounded_root",
    "scale_in_gguf",
]

_LARGEST = 46  # layers of Gemma 2 27B
GEMMA_NAMES = replace(
    HF_NAMES,
    roles={
        **HF_NAMES.roles,
        "mixer_result_norm": "post_attention_layernorm",
        "feed_norm": "pre_feedforward_layernorm",
        "feed_result_norm": "post_feedforward_layernorm",
    },
    norm_offset=1.0,
)
"""Names of Gemma's tensors, from the second Gemma on."""


def _from_config(config: HfConfig) -> DecoderSpec:
    feed, norms = gemma_feed(config), config.norms(placement="both")
    usual = [(layer + 1) % 2 != 0 for layer in range(config.num_layers)]
    windows = config.windows(config.window(default=4096), usual, types_decide=True)
    attention = gemma_attention(config)
    if (cap := cap_of(config, "attn_logit_softcapping", 50.0)) is not None:
        attention = SoftcappedAttention(**asdict(attention), cap=cap)
    layers = (LayerSpec(replace(attention, window=window), feed, norms) for window in windows)
    spec = config.decoder(layers, [config.rope(attention)], GEMMA_NAMES, is_tied=True)
    logits_cap = cap_of(config, "final_logit_softcapping", 30.0)
    return replace(spec, embedding_scale=embedding_scale(config), scales_virtual_tokens=False, logits_cap=logits_cap)


def gemma_attention(config: HfConfig) -> Attention:
    """Return attention whose scores have the factor that the config gives."""
    biased = config.flag("attention_bias", False)
    scale = config.real("query_pre_attn_scalar", 1.0, 1e6, 256.0) ** -0.5
    return replace(config.attention(kv_heads=4, head_dim=256), qkv_bias=biased, o_bias=biased, scale=scale)


def cap_of(config: HfConfig, field: str, default: float | None) -> float | None:
    """Return a bound, which is `default` where the field is absent, and None where it is null."""
    return None if config.data.get(field, default) is None else config.real(field, 1e-3, 1e6, default)


def gemma_feed(config: HfConfig) -> DenseFeed:
    """Return a gated feed with GELU."""
    if config.data.get("hidden_activation", "gelu_pytorch_tanh") != "gelu_pytorch_tanh":
        config.refuse("hidden_activation", "gelu_pytorch_tanh")
    return DenseFeed(config.size("intermediate_size", LIMITS["ffn_size"]), activation="gelu_tanh")


def embedding_scale(config: HfConfig) -> float:
    """Return the root of the hidden size, rounded as the model's authors do, to the dtype of the weights."""
    return rounded_root(config, config.hidden_size)


def rounded_root(config: HfConfig, size: int) -> float:
    """Return the root of a size, rounded to the dtype of the weights."""
    scale = math.sqrt(size)
    if config.dtype != "bfloat16":
        return scale
    bits = np.float32(scale).view(np.uint32)
    return float(((bits + 0x7FFF + (bits >> 16 & 1)) & 0xFFFF0000).view(np.float32))


def _from_header(header: GgufHeader) -> DecoderSpec:
    feed, norms = replace(header.dense(), activation="gelu_tanh"), header.norms("both")
    attention = replace(header.attention(), scale=scale_in_gguf(header, _LARGEST))
    cap = header.real(header.key("attn_logit_softcapping"), 1e-3, 1e6, 50.0)
    attention = SoftcappedAttention(**asdict(attention), cap=cap)
    windows = header.windows(header.window(default=4096), 2)
    layers = (LayerSpec(replace(attention, window=window), feed, norms) for window in windows)
    spec = in_gguf(header, layers, [header.rope(attention)])
    return replace(spec, logits_cap=header.real(header.key("final_logit_softcapping"), 1e-3, 1e6, 30.0))


def scale_in_gguf(header: GgufHeader, largest: int) -> float:
    """Return the factor of scores, which GGUF files leave out.

    It is that of the size of a head, but for the largest model of a generation, whose heads have other sizes than the
    hidden size shared out among them.

    Args:
        header: The file's header.
        largest: Number of layers of the largest model.
    """
    attention = header.attention()
    size = header.hidden_size // attention.heads if header.num_layers == largest else attention.head_dim
    return float(size**-0.5)


def in_gguf(header: GgufHeader, layers: Iterable[LayerSpec], ropes: Sequence[Rope]) -> DecoderSpec:
    """Return the spec of a Gemma whose GGUF file has these layers: weights of norms have their 1 there."""
    spec = header.decoder(layers, ropes, replace(header.names, has_float32_norms=True))
    return replace(spec, embedding_scale=math.sqrt(header.hidden_size), scales_virtual_tokens=False)


GEMMA2 = Family(
    "Gemma2ForCausalLM",
    "gemma2",
    _from_config,
    heeds=frozenset(("attn_logit_softcapping", "final_logit_softcapping", "query_pre_attn_scalar")),
    unread=frozenset(("hidden_act", "sliding_window_size")),
    gguf="gemma2",
    from_header=_from_header,
    gguf_heeds=frozenset(
        (
            "attention.sliding_window",
            "attention.sliding_window_pattern",
            "attn_logit_softcapping",
            "final_logit_softcapping",
        )
    ),
)
