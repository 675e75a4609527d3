"""GLM-4.5, 4.6 and their Air models: half of each head rotated, choices by corrected sigmoids, dense first layers.

GLM-4.5 Team (2025), "GLM-4.5: Agentic, reasoning, and coding (ARC) foundation models". The router is that of
DeepSeek-V3. Layers behind the last, which predict further tokens, are left unread.
"""

from __future__ import annotations

import re
from dataclasses import replace

from headrace.engine.model.experts import ExpertsFeed, SharedExpert
from headrace.engine.model.families.experts.reading import (
    EXPERT_NAMES,
    MOST_SHARED,
    SHARED_EXPERTS,
    expert_size,
    read_routing,
)
from headrace.engine.model.families.family import Family
from headrace.engine.model.families.hf import HfConfig
from headrace.engine.model.roles import Names
from headrace.engine.model.spec import LIMITS, DecoderSpec, LayerSpec
from headrace.ops.routing import Routing

__all__ = ["GLM4_MOE"]

_MOST_SCALE = 1e3


def _routing(config: HfConfig) -> Routing:
    routing = read_routing(config, experts=128, top_k=8, names=("n_routed_experts",))
    groups, scale = config.size("n_group", routing.experts, 1), config.real("routed_scaling_factor", 0, _MOST_SCALE, 1)
    top_groups = config.size("topk_group", groups, 1)
    renormalise = config.flag("norm_topk_prob", True)
    try:
        return replace(
            routing, score="sigmoid", renormalise=renormalise, scale=scale,
            groups=groups, top_groups=top_groups, group_score="top2",
        )  # fmt: skip
    except ValueError as error:
        config.refuse("n_group", f"what n_routed_experts and num_experts_per_tok allow: {error}")


def _names(config: HfConfig) -> Names:
    unread = re.compile(rf"{EXPERT_NAMES.harmless.pattern}|(model\.)?layers\.{config.num_layers}\..*")
    return replace(EXPERT_NAMES, roles={**EXPERT_NAMES.roles, **SHARED_EXPERTS}, harmless=unread)


def _from_config(config: HfConfig) -> DecoderSpec:
    biased, normed = config.flag("attention_bias", False), config.flag("use_qk_norm", False)
    attention = replace(config.attention(kv_heads=8), qkv_bias=biased, qk_norm=normed)
    attention, norms = config.partly_rotated(attention, 0.5), config.norms(1e-5)
    size = expert_size(config, "moe_intermediate_size", 1408)
    shared = SharedExpert(size * config.size("n_shared_experts", MOST_SHARED, 1))
    feed = ExpertsFeed(_routing(config), size, shared=shared, correction_dims=1)
    first = config.data.get("first_k_dense_replace", 1)
    if isinstance(first, bool) or not isinstance(first, int) or not 0 <= first <= LIMITS["num_layers"]:
        config.refuse("first_k_dense_replace", f"an integer from 0 to {LIMITS['num_layers']}")
    dense = config.dense()
    layers = (LayerSpec(attention, dense if layer < first else feed, norms) for layer in range(config.num_layers))
    return config.decoder(layers, [config.rope(attention)], _names(config))


GLM4_MOE = Family(
    "Glm4MoeForCausalLM",
    "glm4_moe",
    _from_config,
    heeds=frozenset(("n_routed_experts", "partial_rotary_factor", "use_qk_norm")),
)
