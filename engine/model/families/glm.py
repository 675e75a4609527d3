"""GLM-4, its first models: biases of queries, keys and values, and half of each head rotated, in pairs side by side.

GLM Team (2024), "ChatGLM: A family of large language models from GLM-130B to GLM-4 all tools".
"""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

from headrace.engine.model.families.family import Family
from headrace.engine.model.families.gguf import GgufHeader
from headrace.engine.model.families.hf import HF_NAMES, HfConfig
from headrace.engine.model.spec import Attention, DecoderSpec, LayerSpec

__all__ = ["EPSILON", "GLM", "GLM_NAMES", "glm_attention", "glm_in_gguf"]

GLM_NAMES = replace(
    HF_NAMES,
    roles={**HF_NAMES.roles, "gate_up": "mlp.gate_up_proj"},
    joined={"gate_up": ("gate", "up")},
)
"""Names of GLM's tensors, of which one holds gates and ups."""
EPSILON = 1.5625e-07
"""Epsilon of norms where a config gives none."""


def glm_attention(config: HfConfig) -> Attention:
    """Return attention that rotates a part of each head, half of it where the config does not say."""
    attention = replace(config.attention(kv_heads=2, head_dim=128), interleaved=True)
    return config.partly_rotated(replace(attention, qkv_bias=config.flag("attention_bias", True)), 0.5)


def _from_config(config: HfConfig) -> DecoderSpec:
    attention, norms = glm_attention(config), config.norms(EPSILON)
    config.windows()  # has none, and refuses layer_types that say otherwise
    layers = [LayerSpec(attention, config.dense(), norms)] * config.num_layers
    return config.decoder(layers, [config.rope(attention)], GLM_NAMES)


def _from_header(header: GgufHeader) -> DecoderSpec:
    return glm_in_gguf(header, "pre")


def glm_in_gguf(header: GgufHeader, placement: Literal["pre", "both"]) -> DecoderSpec:
    """Return the spec of a GLM in a GGUF file, with norms as `placement` says."""
    attention = replace(header.attention(partly_rotated=True), interleaved=True)
    layer = LayerSpec(attention, header.dense(), header.norms(placement))
    return header.decoder(layer, [header.rope(attention)], header.joined_feed_names)


GLM = Family(
    "GlmForCausalLM",
    "glm",
    _from_config,
    heeds=frozenset(("partial_rotary_factor",)),
    gguf="chatglm",
    from_header=_from_header,
)
