"""Qwen3, its models with experts (30B-A3B, 235B-A22B, Coder): dense Qwen3's attention, and 128 experts in each layer.

Yang et al. (2025), "Qwen3 technical report".
"""

from __future__ import annotations

from dataclasses import replace

from headrace.engine.model.experts import ExpertsFeed
from headrace.engine.model.families.experts.gguf import EXPERT_KEYS, expert_names, experts_in_gguf
from headrace.engine.model.families.experts.reading import (
    COUNTS,
    EXPERT_NAMES,
    by_step,
    expert_size,
    read_routing,
)
from headrace.engine.model.families.family import Family
from headrace.engine.model.families.gguf import GgufHeader
from headrace.engine.model.families.hf import HfConfig
from headrace.engine.model.spec import DecoderSpec, LayerSpec

__all__ = ["QWEN3_MOE"]


def _from_config(config: HfConfig) -> DecoderSpec:
    if not config.flag("use_qk_norm", True):  # Coder's config says what all of them have
        config.refuse("use_qk_norm", "true")
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
    attention = replace(header.attention(), qk_norm=True)
    layer = LayerSpec(attention, experts_in_gguf(header, renormalise=True), header.norms())
    return header.decoder(layer, [header.rope(attention)], expert_names(header))


QWEN3_MOE = Family(
    "Qwen3MoeForCausalLM",
    "qwen3_moe",
    _from_config,
    heeds=COUNTS | {"use_qk_norm"},
    unread=frozenset(("intermediate_size", "max_window_layers", "sliding_window")),
    gguf="qwen3moe",
    from_header=_from_header,
    gguf_heeds=EXPERT_KEYS,
)
