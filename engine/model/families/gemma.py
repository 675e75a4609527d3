"""Gemma 2, and the text models of Gemma 3: norms on both sides of mixer and feed, windows in some layers, and GELU.

Gemma Team (2024), "Gemma 2: Improving open language models at a practical size"; Gemma Team (2025), "Gemma 3 technical
report". Checkpoints hold the weights of norms less 1, and scores have a factor that the size of a head does not decide.
Gemma 2 bounds scores and logits. Gemma 3 norms heads instead, and its layers with a window have a rope of their own.
"""

from __future__ import annotations

import math
from dataclasses import fields, replace

import numpy as np

from headrace.engine.model.families.family import Family
from headrace.engine.model.families.hf import HF_NAMES, HfConfig
from headrace.engine.model.rope import Rope
from headrace.engine.model.spec import LIMITS, Attention, DecoderSpec, DenseFeed, LayerSpec, SoftcappedAttention

__all__ = ["GEMMA2", "GEMMA3"]

_NAMES = replace(
    HF_NAMES,
    roles={
        **HF_NAMES.roles,
        "mixer_result_norm": "post_attention_layernorm",
        "feed_norm": "pre_feedforward_layernorm",
        "feed_result_norm": "post_feedforward_layernorm",
    },
    norm_offset=1.0,
)
_THETA, _LOCAL_THETA = 1e6, 1e4
_FULL, _SLIDING = "full_attention", "sliding_attention"


def _from_config_2(config: HfConfig) -> DecoderSpec:
    feed, norms = _feed(config), config.norms(placement="both")
    usual = [(layer + 1) % 2 != 0 for layer in range(config.num_layers)]
    windows = config.windows(config.window(default=4096), usual, types_decide=True)
    attention = _attention(config)
    if (cap := _cap(config, "attn_logit_softcapping", 50.0)) is not None:
        plain = {field.name: getattr(attention, field.name) for field in fields(attention)}
        attention = SoftcappedAttention(**plain, cap=cap)
    layers = (LayerSpec(replace(attention, window=window), feed, norms) for window in windows)
    spec = config.decoder(layers, [config.rope(attention)], _NAMES, is_tied=True)
    logits_cap = _cap(config, "final_logit_softcapping", 30.0)
    return replace(spec, embedding_scale=_embedding_scale(config), logits_cap=logits_cap)


def _from_config_3(config: HfConfig) -> DecoderSpec:
    feed, norms = _feed(config), config.norms(placement="both")
    period = config.size("sliding_window_pattern", LIMITS["num_layers"], 6)
    usual = [(layer + 1) % period != 0 for layer in range(config.num_layers)]
    windowed = config.windowed(config.window(default=4096), usual, types_decide=True)
    attention = replace(_attention(config), qk_norm=True)
    layers = (
        LayerSpec(replace(attention, window=window, rope=int(has_window)), feed, norms)
        for has_window, window in windowed
    )
    local = Rope(config.real("rope_local_base_freq", 1.0, 1e12, _LOCAL_THETA))
    sliding = config.rope(attention, _LOCAL_THETA, _SLIDING) if config.has_rope_of(_SLIDING) else local
    ropes = [config.rope(attention, _THETA, _FULL), sliding]
    return replace(config.decoder(layers, ropes, _NAMES, is_tied=True), embedding_scale=_embedding_scale(config))


def _attention(config: HfConfig) -> Attention:
    biased = config.flag("attention_bias", False)
    scale = config.real("query_pre_attn_scalar", 1.0, 1e6, 256.0) ** -0.5
    return replace(config.attention(head_dim=256), qkv_bias=biased, o_bias=biased, scale=scale)


def _cap(config: HfConfig, field: str, default: float) -> float | None:
    """Return a bound, which is `default` where the field is absent, and None where it is null."""
    return None if config.data.get(field, default) is None else config.real(field, 1e-3, 1e6, default)


def _feed(config: HfConfig) -> DenseFeed:
    if config.data.get("hidden_activation", "gelu_pytorch_tanh") != "gelu_pytorch_tanh":
        config.refuse("hidden_activation", "gelu_pytorch_tanh")
    return DenseFeed(config.size("intermediate_size", LIMITS["ffn_size"]), activation="gelu_tanh")


def _embedding_scale(config: HfConfig) -> float:
    """Return the root of the hidden size, rounded as the model's authors do, to the dtype of the weights."""
    scale = math.sqrt(config.hidden_size)
    if config.data.get("dtype", config.data.get("torch_dtype")) != "bfloat16":
        return scale
    bits = np.float32(scale).view(np.uint32)
    return float(((bits + 0x7FFF + (bits >> 16 & 1)) & 0xFFFF0000).view(np.float32))


GEMMA2 = Family(
    "Gemma2ForCausalLM",
    "gemma2",
    _from_config_2,
    heeds=frozenset(("attn_logit_softcapping", "final_logit_softcapping", "query_pre_attn_scalar")),
)
GEMMA3 = Family("Gemma3ForCausalLM", "gemma3_text", _from_config_3, heeds=frozenset(("query_pre_attn_scalar",)))
