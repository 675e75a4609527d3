"""ERNIE 4.5, its text models with experts (21B-A3B, 300B-A47B): heads rotated in pairs, and corrected choices.

Baidu (2025), "ERNIE 4.5 technical report". A correction of each expert is added to the softmax for the choice alone.
Layers that predict further tokens (`mtp`) are left unread.
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
    expert_size,
    read_routing,
)
from headrace.engine.model.families.family import Family
from headrace.engine.model.families.gguf import GgufHeader
from headrace.engine.model.families.hf import HfConfig
from headrace.engine.model.spec import LIMITS, DecoderSpec, LayerSpec

__all__ = ["ERNIE_4_5_MOE"]

_ROLES = {**EXPERT_NAMES.roles, **SHARED_EXPERTS, "correction": "mlp.moe_statics"}
_UNREAD = re.compile(rf"{EXPERT_NAMES.harmless.pattern}|(model\.)?mtp_.*")
_STEP = "interleave_moe_layer_step"
_NAMES = replace(EXPERT_NAMES, roles=_ROLES, harmless=_UNREAD)


def _feed(config: HfConfig) -> ExpertsFeed:
    routing = read_routing(config, experts=64, top_k=6, names=("moe_num_experts",), top_k_name="moe_k")
    config.real("moe_norm_min", 0.0, 1e-6, 1e-12)  # the least sum that weights are divided by: none is as small
    size, shared = expert_size(config, "moe_intermediate_size", 1536), None
    if config.data.get("moe_num_shared_experts") != 0:
        shared = SharedExpert(size * config.size("moe_num_shared_experts", MOST_SHARED, 2))
    return ExpertsFeed(replace(routing, renormalise=True), size, shared=shared, correction_dims=2)


def _has_experts(config: HfConfig) -> list[bool]:
    """Return for each layer whether it has experts, by the first and last such layer and the step between them."""
    most = LIMITS["num_layers"]
    bounds = []
    for field, default, least in (("moe_layer_start_index", 1, 0), ("moe_layer_end_index", -1, -1)):
        value = config.data.get(field, default)
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value < most:
            config.refuse(field, f"a number of a layer, below {most}" + (", or -1 for the last" if least else ""))
        bounds.append(config.num_layers - 1 if value == -1 else value)
    step = config.size("moe_layer_interval", most, 1)
    return [bounds[0] <= layer <= bounds[1] and (layer + 1) % step == 0 for layer in range(config.num_layers)]


def _from_config(config: HfConfig) -> DecoderSpec:
    config.expect("compression_ratio", 1)
    config.expect("moe_gate_act", "softmax")
    if config.flag("use_bias", False):
        config.refuse("use_bias", "false")
    attention, norms = replace(config.attention(kv_heads=4), interleaved=True), config.norms(1e-5)
    dense, routed = config.dense(), _feed(config)
    layers = [LayerSpec(attention, routed if each else dense, norms) for each in _has_experts(config)]
    return config.decoder(layers, [config.rope(attention, 5e5)], _NAMES, is_tied=True)


def _from_header(header: GgufHeader) -> DecoderSpec:
    attention, norms = replace(header.attention(), interleaved=True), header.norms()
    feed = corrected_in_gguf(header, experts_in_gguf(header, renormalise=True))
    routed, dense = replace(feed, shared=shared_in_gguf(header, feed, by_count=True)), header.dense()
    first, step = leading_dense(header), header.size(header.key(_STEP), LIMITS["num_layers"])
    has_experts = (layer >= first and (layer + 1) % step == 0 for layer in range(header.num_layers))
    layers = [LayerSpec(attention, routed if each else dense, norms) for each in has_experts]
    return header.decoder(layers, [header.rope(attention)], expert_names(header))


ERNIE_4_5_MOE = Family(
    "Ernie4_5_MoeForCausalLM",
    "ernie4_5_moe",
    _from_config,
    heeds=frozenset(("moe_num_experts",)),
    unread=frozenset(("moe_capacity", "moe_gate", "moe_use_aux_free", "num_nextn_predict_layers", "use_rmsnorm")),
    gguf="ernie4_5-moe",
    from_header=_from_header,
    gguf_heeds=EXPERT_KEYS | SHARED_KEYS | {"leading_dense_block_count", _STEP},
)
