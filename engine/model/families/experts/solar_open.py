"""Solar Open: Llama's attention, and in every layer experts that are chosen by corrected sigmoids, and a shared one.

Upstage (2026), "Solar Open technical report". The router is that of DeepSeek-V3.
"""

from __future__ import annotations

from dataclasses import replace

from headrace.engine.model.experts import ExpertsFeed, SharedExpert
from headrace.engine.model.families.experts.reading import (
    EXPERT_NAMES,
    MOST_SHARED,
    SHARED_EXPERTS,
    corrected_routing,
    expert_size,
)
from headrace.engine.model.families.family import Family
from headrace.engine.model.families.hf import HfConfig
from headrace.engine.model.spec import DecoderSpec, LayerSpec
from headrace.ops.routing import Routing

__all__ = ["SOLAR_OPEN"]

_NAMES = replace(EXPERT_NAMES, roles={**EXPERT_NAMES.roles, **SHARED_EXPERTS})


def _from_config(config: HfConfig) -> DecoderSpec:
    attention = replace(config.attention(kv_heads=8, head_dim=128), qkv_bias=config.flag("attention_bias", False))
    size = expert_size(config, "moe_intermediate_size", 1280)
    shared = SharedExpert(size * config.size("n_shared_experts", MOST_SHARED, 1))
    feed = ExpertsFeed(corrected_routing(config, Routing(128, 8)), size, shared=shared, correction_dims=1)
    layers = [LayerSpec(attention, feed, config.norms(1e-5))] * config.num_layers
    return config.decoder(layers, [config.rope(attention, 1e6)], _NAMES)


SOLAR_OPEN = Family(
    "SolarOpenForCausalLM",
    "solar_open",
    _from_config,
    heeds=frozenset(("n_routed_experts",)),
    unread=frozenset(("intermediate_size",)),  # of dense layers, of which there are none
)
