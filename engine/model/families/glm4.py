"""GLM-4-0414 and GLM-Z1: the first GLM-4 with norms on both sides of mixer and feed.

Zhipu AI (2025), model card of GLM-4-32B-0414.
"""

from __future__ import annotations

from dataclasses import replace

from headrace.engine.model.families.family import Family
from headrace.engine.model.families.gguf import GgufHeader
from headrace.engine.model.families.glm import EPSILON, GLM_NAMES, glm_attention, glm_in_gguf
from headrace.engine.model.families.hf import HfConfig
from headrace.engine.model.spec import DecoderSpec, LayerSpec

__all__ = ["GLM4"]

_NAMES = replace(
    GLM_NAMES,
    roles={
        **GLM_NAMES.roles,
        "mixer_result_norm": "post_self_attn_layernorm",
        "feed_result_norm": "post_mlp_layernorm",
    },
)


def _from_config(config: HfConfig) -> DecoderSpec:
    attention, norms = glm_attention(config), config.norms(EPSILON, placement="both")
    config.windows()  # has none, and refuses layer_types that say otherwise
    layers = [LayerSpec(attention, config.dense(), norms)] * config.num_layers
    return config.decoder(layers, [config.rope(attention)], _NAMES)


def _from_header(header: GgufHeader) -> DecoderSpec:
    return glm_in_gguf(header, "both")


GLM4 = Family(
    "Glm4ForCausalLM",
    "glm4",
    _from_config,
    heeds=frozenset(("partial_rotary_factor",)),
    gguf="glm4",
    from_header=_from_header,
)
