"""OLMoE: Llama's layers with norms of all query and of all key heads, and 64 experts of which eight compute each token.

Muennighoff et al. (2024), "OLMoE: Open mixture-of-experts language models".
"""

from __future__ import annotations

from dataclasses import replace

from headrace.engine.model.experts import ExpertsFeed
from headrace.engine.model.families.experts.gguf import EXPERT_KEYS, expert_names, experts_in_gguf
from headrace.engine.model.families.experts.reading import COUNTS, EXPERT_NAMES, expert_size, read_routing
from headrace.engine.model.families.family import Family
from headrace.engine.model.families.gguf import GgufHeader
from headrace.engine.model.families.hf import HfConfig
from headrace.engine.model.spec import DecoderSpec, LayerSpec

__all__ = ["OLMOE"]


def _from_config(config: HfConfig) -> DecoderSpec:
    biased = config.flag("attention_bias", False)
    attention = replace(config.attention(), qkv_bias=biased, o_bias=biased, qk_norm_across_heads=True)
    routing = read_routing(config, experts=64, top_k=8)
    routing = replace(routing, renormalise=config.flag("norm_topk_prob", False))
    feed, norms = ExpertsFeed(routing, expert_size(config, "intermediate_size", 2048)), config.norms(1e-5)
    config.windows()  # has none, and refuses layer_types that say otherwise
    layers = [LayerSpec(attention, feed, norms)] * config.num_layers
    return config.decoder(layers, [config.rope(attention)], EXPERT_NAMES)


def _from_header(header: GgufHeader) -> DecoderSpec:
    attention = replace(header.attention(), qk_norm_across_heads=True)
    feed = experts_in_gguf(header, renormalise=False, size="feed_forward_length")
    layer = LayerSpec(attention, feed, header.norms())
    return header.decoder(layer, [header.rope(attention)], expert_names(header))


OLMOE = Family(
    "OlmoeForCausalLM",
    "olmoe",
    _from_config,
    heeds=COUNTS,
    gguf="olmoe",
    from_header=_from_header,
    gguf_heeds=EXPERT_KEYS - {"expert_feed_forward_length"},
)
