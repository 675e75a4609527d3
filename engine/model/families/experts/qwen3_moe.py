"""Qwen3, its models with experts (30B-A3B, 235B-A22B, Coder): dense Qwen3's attention, and 128 experts in each layer.

Yang et al. (2025), "Qwen3 technical report".
"""

from __future__ import annotations

from dataclasses import replace

from headrace.engine.model.experts import ExpertsFeed
from headrace.engine.model.families.experts.reading import (
    COUNTS,
    EXPERT_NAMES,
    MOST_EXPERTS,
    by_step,
    expert_size,
    read_routing,
)
from headrace.engine.model.families.family import Family
from headrace.engine.model.families.gguf import GgufHeader
from headrace.engine.model.families.hf import HfConfig
from headrace.engine.model.spec import LIMITS, DecoderSpec, LayerSpec
from headrace.ops.routing import Routing

__all__ = ["QWEN3_MOE"]

_GGUF_ROLES = {
    "router": "ffn_gate_inp",
    "expert_gate": "ffn_gate_exps.{}",
    "expert_up": "ffn_up_exps.{}",
    "expert_down": "ffn_down_exps.{}",
}


def _from_config(config: HfConfig) -> DecoderSpec:
    biased = config.flag("attention_bias", False)
    attention = replace(config.attention(kv_heads=4), qkv_bias=biased, o_bias=biased, qk_norm=True)
    window = config.window(default=4096) if config.flag("use_sliding_window", False) else None
    routing = read_routing(config, experts=128, top_k=8)
    routing = replace(routing, renormalise=config.flag("norm_topk_prob", False))
    feeds = by_step(config, ExpertsFeed(routing, expert_size(config, "moe_intermediate_size", 768)))
    norms, windows = config.norms(), config.windows(window)
    mixers = (replace(attention, window=window) for window in windows)
    layers = (LayerSpec(mixer, feed, norms) for mixer, feed in zip(mixers, feeds, strict=True))
    return config.decoder(layers, [config.rope(attention)], EXPERT_NAMES)


def _from_header(header: GgufHeader) -> DecoderSpec:
    count, used, size = (header.key(f"expert_{each}") for each in ("count", "used_count", "feed_forward_length"))
    experts = header.size(count, MOST_EXPERTS // header.num_layers)
    routing = Routing(experts, header.size(used, experts), renormalise=True)
    feed = ExpertsFeed(routing, header.size(size, LIMITS["ffn_size"]))
    attention = replace(header.attention(), qk_norm=True)
    names = replace(header.names, roles={**header.names.roles, **_GGUF_ROLES})
    return header.decoder(LayerSpec(attention, feed, header.norms()), [header.rope(attention)], names)


QWEN3_MOE = Family(
    "Qwen3MoeForCausalLM",
    "qwen3_moe",
    _from_config,
    heeds=COUNTS,
    gguf="qwen3moe",
    from_header=_from_header,
    gguf_heeds=frozenset(("expert_count", "expert_used_count", "expert_feed_forward_length")),
)
