"""Mixtral 8x7B and 8x22B: Mistral with eight experts, of which two compute each token.

Jiang et al. (2024), "Mixtral of experts".
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from headrace.engine.model.experts import ExpertsFeed
from headrace.engine.model.families.experts.reading import COUNTS, EXPERT_NAMES, expert_size, read_routing
from headrace.engine.model.families.family import Family
from headrace.engine.model.families.hf import HfConfig
from headrace.engine.model.spec import DecoderSpec, LayerSpec

__all__ = ["MIXTRAL", "MIXTRAL_NAMES"]

MIXTRAL_NAMES: Final = replace(
    EXPERT_NAMES,
    roles={
        **EXPERT_NAMES.roles,
        "router": "block_sparse_moe.gate",
        "expert_gate": "block_sparse_moe.experts.{}.w1",
        "expert_up": "block_sparse_moe.experts.{}.w3",
        "expert_down": "block_sparse_moe.experts.{}.w2",
    },
    later={role: EXPERT_NAMES.roles[role] for role in ("router", "expert_gate", "expert_up", "expert_down")},
)
"""Names of Mixtral's experts, as they were published, and those that transformers 5 gives to them."""


def _from_config(config: HfConfig) -> DecoderSpec:
    attention, norms = config.attention(kv_heads=8), config.norms(1e-5)
    # The softmax over two chosen experts: that over all of them, renormalised.
    routing = replace(read_routing(config, experts=8, top_k=2), score="softmax_of_chosen")
    feed = ExpertsFeed(routing, expert_size(config, "intermediate_size", 14336))
    windows = config.windows(config.window(default=None))
    layers = (LayerSpec(replace(attention, window=window), feed, norms) for window in windows)
    return config.decoder(layers, [config.rope(attention, 1e6)], MIXTRAL_NAMES)


MIXTRAL = Family("MixtralForCausalLM", "mixtral", _from_config, heeds=COUNTS)
