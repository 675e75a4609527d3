"""Granite 3, its models with experts: 1B-A400M and 3B-A800M.

Granite Team, IBM (2024), "Granite 3.0 language models". Attention and factors are those of the dense models. A layer's
experts lie in two tensors: the reader of stacked experts finds each of them there by the names below.
"""

from __future__ import annotations

from dataclasses import replace

from headrace.engine.model.experts import ExpertsFeed
from headrace.engine.model.families.experts.gguf import expert_names, experts_in_gguf, shared_in_gguf
from headrace.engine.model.families.experts.reading import COUNTS, EXPERT_NAMES, expert_size, read_routing
from headrace.engine.model.families.family import Family
from headrace.engine.model.families.gguf import GgufHeader
from headrace.engine.model.families.granite import GRANITE, granite_decoder, granite_in_gguf
from headrace.engine.model.families.hf import HfConfig
from headrace.engine.model.spec import DecoderSpec

__all__ = ["GRANITE_MOE", "NAMES", "granite_experts"]

_ROLES = {
    **EXPERT_NAMES.roles,
    "router": "block_sparse_moe.router.layer",
    "expert_gate": "block_sparse_moe.experts.{}.gate_proj",
    "expert_up": "block_sparse_moe.experts.{}.up_proj",
    "expert_down": "block_sparse_moe.experts.{}.down_proj",
    "shared_gate_up": "shared_mlp.input_linear",
    "shared_down": "shared_mlp.output_linear",
}
NAMES = replace(
    EXPERT_NAMES,
    roles=_ROLES,
    joined={"shared_gate_up": ("shared_gate", "shared_up")},
    later={"router": "block_sparse_moe.router"},
)
"""Names of the tensors, those of a shared expert included."""


def granite_experts(config: HfConfig) -> ExpertsFeed:
    """Return the experts of a layer, with none shared."""
    routing = replace(read_routing(config, experts=8, top_k=2), score="softmax_of_chosen")
    return ExpertsFeed(routing, expert_size(config, "intermediate_size", 11008))


def _from_config(config: HfConfig) -> DecoderSpec:
    return granite_decoder(config, granite_experts(config), NAMES)


def _from_header(header: GgufHeader) -> DecoderSpec:
    """Return the spec of a GGUF file, whose models with a shared expert are of the same architecture."""
    feed = experts_in_gguf(header, renormalise=False, size="feed_forward_length")
    feed = replace(feed, routing=replace(feed.routing, score="softmax_of_chosen"))
    shared = shared_in_gguf(header, feed)
    spec = granite_in_gguf(header, replace(feed, shared=shared), expert_names(header))
    return spec if shared is None else replace(spec, architecture="GraniteMoeSharedForCausalLM")


GRANITE_MOE = Family(
    "GraniteMoeForCausalLM",
    "granitemoe",
    _from_config,
    heeds=GRANITE.heeds | COUNTS,
    gguf="granitemoe",
    from_header=_from_header,
    gguf_heeds=GRANITE.gguf_heeds | {"expert_count", "expert_used_count"},
)
