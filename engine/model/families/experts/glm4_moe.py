"""GLM-4.5, 4.6 and their Air models: half of each head rotated, choices by corrected sigmoids, dense first layers.

GLM-4.5 Team (2025), "GLM-4.5: Agentic, reasoning, and coding (ARC) foundation models". The router is that of
DeepSeek-V3. Layers behind the last, which predict further tokens, are left unread.
"""

from __future__ import annotations

from dataclasses import replace

from headrace.engine.model.experts import ExpertsFeed, SharedExpert
from headrace.engine.model.families.experts.reading import (
    EXPERT_NAMES,
    MOST_SHARED,
    SHARED_EXPERTS,
    corrected_routing,
    dense_at_first,
    expert_size,
    names_of_layers,
)
from headrace.engine.model.families.family import Family
from headrace.engine.model.families.hf import HfConfig
from headrace.engine.model.spec import DecoderSpec, LayerSpec
from headrace.ops.routing import Routing

__all__ = ["GLM4_MOE"]

_NAMES = replace(EXPERT_NAMES, roles={**EXPERT_NAMES.roles, **SHARED_EXPERTS})


def _from_config(config: HfConfig) -> DecoderSpec:
    biased, normed = config.flag("attention_bias", False), config.flag("use_qk_norm", False)
    attention = replace(config.attention(kv_heads=8), qkv_bias=biased, qk_norm=normed)
    attention, norms = config.partly_rotated(attention, 0.5), config.norms(1e-5)
    size = expert_size(config, "moe_intermediate_size", 1408)
    shared = SharedExpert(size * config.size("n_shared_experts", MOST_SHARED, 1))
    routing = corrected_routing(config, Routing(128, 8))
    dense, feed = config.dense(), ExpertsFeed(routing, size, shared=shared, correction_dims=1)
    layers = (LayerSpec(attention, dense if each else feed, norms) for each in dense_at_first(config, 1))
    return config.decoder(layers, [config.rope(attention)], names_of_layers(config, _NAMES))


GLM4_MOE = Family(
    "Glm4MoeForCausalLM",
    "glm4_moe",
    _from_config,
    heeds=frozenset(("n_routed_experts", "partial_rotary_factor", "use_qk_norm")),
)
