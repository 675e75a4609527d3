"""GLM-4.5, 4.6 and their Air models: half of each head rotated, choices by corrected sigmoids, dense first layers.

GLM-4.5 Team (2025), "GLM-4.5: Agentic, reasoning, and coding (ARC) foundation models". The router is that of
DeepSeek-V3. Layers behind the last, which predict further tokens, are left unread.
"""

from __future__ import annotations

import re
from dataclasses import replace

from headrace.engine.model.experts import ExpertsFeed, SharedExpert
from headrace.engine.model.families.experts.gguf import (
    EXPERT_KEYS,
    SHARED_KEYS,
    corrected_in_gguf,
    expert_names,
    experts_in_gguf,
    leading_dense,
    shared_in_gguf,
)
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
from headrace.engine.model.families.gguf import GgufHeader
from headrace.engine.model.families.hf import HfConfig
from headrace.engine.model.spec import DecoderSpec, LayerSpec
from headrace.ops.routing import Routing

__all__ = ["GLM4_MOE"]

_FURTHER = "nextn_predict_layers"
_SIGMOID = 2  # in `expert_gating_func`
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


def _from_header(header: GgufHeader) -> DecoderSpec:
    attention = header.attention(partly_rotated=True)
    attention = replace(attention, qk_norm="blk.0.attn_q_norm.weight" in header.shapes)
    feed = experts_in_gguf(header, renormalise=header.flag(header.key("expert_weights_norm"), False))
    feed = replace(feed, routing=_routing_in_gguf(header, feed.routing))
    feed = corrected_in_gguf(header, replace(feed, shared=shared_in_gguf(header, feed, by_count=True)))
    first, norms, count = leading_dense(header), header.norms(), header.num_layers
    further = header.size(header.key(_FURTHER), count - 1) if header.data.get(header.key(_FURTHER), 0) != 0 else 0
    mixers = (attention for _ in range(count - further))
    layers = [LayerSpec(mixer, header.dense() if layer < first else feed, norms) for layer, mixer in enumerate(mixers)]
    names = expert_names(header)
    unread = "|".join(str(count - further + each) for each in range(further))
    if unread:
        names = replace(names, harmless=re.compile(rf"{names.harmless.pattern}|blk\.({unread})\..*"))
    names = replace(names, roles={**names.roles, "feed_norm": "post_attention_norm"})
    return header.decoder(layers, [header.rope(attention)], names)


def _routing_in_gguf(header: GgufHeader, routing: Routing) -> Routing:
    """Return a routing by sigmoids, in groups where the file has some."""
    if header.data.get(header.key("expert_gating_func"), _SIGMOID) != _SIGMOID:
        header.refuse(header.key("expert_gating_func"), f"{_SIGMOID}, the sigmoid")
    scale = header.real(header.key("expert_weights_scale"), 0.0, 1e3, 1.0)
    groups = header.size(header.key("expert_group_count"), routing.experts, 1)
    top_groups = header.size(header.key("expert_group_used_count"), groups, 1)
    by_sigmoids = replace(routing, score="sigmoid", scale=scale, group_score="top2")
    try:
        return replace(by_sigmoids, groups=groups, top_groups=top_groups)
    except ValueError as error:
        header.refuse(header.key("expert_group_count"), f"what the number of experts allows: {error}")


GLM4_MOE = Family(
    "Glm4MoeForCausalLM",
    "glm4_moe",
    _from_config,
    heeds=frozenset(("n_routed_experts", "partial_rotary_factor", "use_qk_norm")),
    gguf="glm4moe",
    from_header=_from_header,
    gguf_heeds=EXPERT_KEYS
    | SHARED_KEYS
    | {
        "expert_gating_func",
        "expert_group_count",
        "expert_group_used_count",
        "expert_weights_norm",
        "expert_weights_scale",
        "leading_dense_block_count",
        _FURTHER,
    },
)
