"""Granite 3, its models with experts (1B-A400M, 3B-A800M), and those with a shared expert beside them.

Granite Team, IBM (2024), "Granite 3.0 language models". Attention and factors are those of the dense models. A layer's
experts lie in two tensors: the reader of stacked experts finds each of them there by the names below.
"""

from __future__ import annotations

from dataclasses import replace

from headrace.engine.model.experts import ExpertsFeed, SharedExpert
from headrace.engine.model.families.experts.reading import COUNTS, EXPERT_NAMES, expert_size, read_routing
from headrace.engine.model.families.family import Family
from headrace.engine.model.families.granite import GRANITE, granite_decoder
from headrace.engine.model.families.hf import HfConfig
from headrace.engine.model.spec import LIMITS, DecoderSpec

__all__ = ["GRANITE_MOE", "GRANITE_MOE_SHARED"]

_ROLES = {
    **EXPERT_NAMES.roles,
    "router": "block_sparse_moe.router.layer",
    "expert_gate": "block_sparse_moe.experts.{}.gate_proj",
    "expert_up": "block_sparse_moe.experts.{}.up_proj",
    "expert_down": "block_sparse_moe.experts.{}.down_proj",
    "shared_gate_up": "shared_mlp.input_linear",
    "shared_down": "shared_mlp.output_linear",
}
_NAMES = replace(EXPERT_NAMES, roles=_ROLES, joined={"shared_gate_up": ("shared_gate", "shared_up")})


def _feed(config: HfConfig) -> ExpertsFeed:
    routing = replace(read_routing(config, experts=8, top_k=2), score="softmax_of_chosen")
    return ExpertsFeed(routing, expert_size(config, "intermediate_size", 11008))


def _from_config(config: HfConfig) -> DecoderSpec:
    return granite_decoder(config, _feed(config), _NAMES)


def _from_shared_config(config: HfConfig) -> DecoderSpec:
    feed = _feed(config)
    if config.data.get("shared_intermediate_size"):
        feed = replace(feed, shared=SharedExpert(config.size("shared_intermediate_size", LIMITS["ffn_size"])))
    return granite_decoder(config, feed, _NAMES)


GRANITE_MOE = Family("GraniteMoeForCausalLM", "granitemoe", _from_config, heeds=GRANITE.heeds | COUNTS)
GRANITE_MOE_SHARED = Family(
    "GraniteMoeSharedForCausalLM", "granitemoeshared", _from_shared_config, heeds=GRANITE.heeds | COUNTS
)
