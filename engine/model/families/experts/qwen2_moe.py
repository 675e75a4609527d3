"""Qwen1.5-MoE and Qwen2-57B-A14B: Qwen2 with experts, and a shared expert whose result a gate scales.

Yang et al. (2024), "Qwen2 technical report", section 2.2.2.
"""

from __future__ import annotations

from dataclasses import replace

from headrace.engine.model.experts import ExpertsFeed, SharedExpert
from headrace.engine.model.families.experts.gguf import EXPERT_KEYS, expert_names, experts_in_gguf, shared_in_gguf
from headrace.engine.model.families.experts.reading import COUNTS, EXPERT_NAMES, by_step, expert_size, read_routing
from headrace.engine.model.families.family import Family
from headrace.engine.model.families.gguf import GgufHeader
from headrace.engine.model.families.hf import HfConfig
from headrace.engine.model.spec import LIMITS, DecoderSpec, LayerSpec

__all__ = ["QWEN2_MOE"]

_WINDOWED_LAYERS = 28  # the default of `max_window_layers`


def _windows(config: HfConfig) -> tuple[int | None, ...]:
    """Return the window of each layer: with `use_sliding_window`, that of even layers before `max_window_layers`."""
    if not config.flag("use_sliding_window", False):
        return config.windows()
    last = config.size("max_window_layers", LIMITS["num_layers"], _WINDOWED_LAYERS)
    has_window = [layer % 2 == 0 and layer < last for layer in range(config.num_layers)]
    return config.windows(config.window(default=4096), has_window, types_decide=True)


def _from_config(config: HfConfig) -> DecoderSpec:
    attention = replace(config.attention(kv_heads=16), qkv_bias=config.flag("qkv_bias", True))
    routing = read_routing(config, experts=60, top_k=4)
    routing = replace(routing, renormalise=config.flag("norm_topk_prob", False))
    shared = SharedExpert(config.size("shared_expert_intermediate_size", LIMITS["ffn_size"], 5632), gated=True)
    feed = ExpertsFeed(routing, expert_size(config, "moe_intermediate_size", 1408), shared=shared)
    norms, windows, feeds = config.norms(), _windows(config), by_step(config, feed)
    mixers = (replace(attention, window=window) for window in windows)
    layers = (LayerSpec(mixer, feed, norms) for mixer, feed in zip(mixers, feeds, strict=True))
    return config.decoder(layers, [config.rope(attention)], EXPERT_NAMES)


def _from_header(header: GgufHeader) -> DecoderSpec:
    attention, feed = header.attention(), experts_in_gguf(header, renormalise=False)
    layer = LayerSpec(attention, replace(feed, shared=shared_in_gguf(header, feed)), header.norms())
    return header.decoder(layer, [header.rope(attention)], expert_names(header))


QWEN2_MOE = Family(
    "Qwen2MoeForCausalLM",
    "qwen2_moe",
    _from_config,
    heeds=COUNTS,
    unread=frozenset(("intermediate_size", "max_window_layers", "sliding_window")),
    gguf="qwen2moe",
    from_header=_from_header,
    gguf_heeds=EXPERT_KEYS | {"expert_shared_feed_forward_length"},
)
