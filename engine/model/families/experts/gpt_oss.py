"""gpt-oss 20B and 120B: heads with sinks, windows in every other layer, and experts with biases and a clamped gate.

OpenAI (2025), "gpt-oss-120b and gpt-oss-20b model card".
"""

from __future__ import annotations

from dataclasses import replace

from headrace.engine.model.experts import ExpertsFeed
from headrace.engine.model.families.experts.gguf import EXPERT_KEYS, expert_names, experts_in_gguf
from headrace.engine.model.families.experts.reading import COUNTS, EXPERT_NAMES, expert_size, read_routing
from headrace.engine.model.families.family import Family
from headrace.engine.model.families.gguf import GgufHeader
from headrace.engine.model.families.hf import HfConfig
from headrace.engine.model.rope import Yarn
from headrace.engine.model.spec import DecoderSpec, LayerSpec, SinkAttention
from headrace.ops.routing import CLAMP, SLOPE

__all__ = ["GPT_OSS"]

_ROLES = {
    **EXPERT_NAMES.roles,
    "attention": "self_attn",
    "router": "mlp.router",
    "experts": "mlp.experts",
    "expert_gate": "mlp.experts.{}.gate_in_turn",
    "expert_up": "mlp.experts.{}.up_in_turn",
    "expert_down": "mlp.experts.{}.turned",
}
_THETA = 150000.0


def _feed(config: HfConfig) -> ExpertsFeed:
    for field, value in (("swiglu_limit", CLAMP), ("swiglu_alpha", SLOPE)):
        if config.real(field, 0.0, 1e3, value) != value:
            config.refuse(field, value)
    routing = replace(read_routing(config, experts=128, top_k=4), score="softmax_of_chosen")
    size = expert_size(config, "intermediate_size", 2880)
    return ExpertsFeed(routing, size, activation="clamped_swiglu", biased=True)


def _from_config(config: HfConfig) -> DecoderSpec:
    plain, biased = config.attention(kv_heads=8, head_dim=64), config.flag("attention_bias", True)
    attention = SinkAttention(plain.heads, plain.kv_heads, plain.head_dim, qkv_bias=biased, o_bias=biased)
    if not any(config.data.get(field) for field in ("rope_parameters", "rope_scaling")):
        config.refuse("rope_parameters", "an object: without one, rotations are those of an unnamed default")
    norms, feed = config.norms(1e-5), _feed(config)
    every_other = [layer % 2 == 0 for layer in range(config.num_layers)]
    windows = config.windows(config.window(default=128), every_other, types_decide=True)
    layers = (LayerSpec(replace(attention, window=window), feed, norms) for window in windows)
    return config.decoder(layers, [config.rope(attention, _THETA)], replace(EXPERT_NAMES, roles=_ROLES))


def _from_header(header: GgufHeader) -> DecoderSpec:
    plain, norms = header.attention(), header.norms()
    attention = SinkAttention(plain.heads, plain.kv_heads, plain.head_dim, qkv_bias=plain.qkv_bias, o_bias=plain.o_bias)
    feed = experts_in_gguf(header, renormalise=False)
    routing = replace(feed.routing, score="softmax_of_chosen")
    feed = replace(feed, routing=routing, activation="clamped_swiglu", biased=True, has_biases_apart=True)
    windows = header.windows(header.window(default=128), 2)
    layers = (LayerSpec(replace(attention, window=window), feed, norms) for window in windows)
    rope, names = header.rope(attention), expert_names(header)
    if isinstance(rope.scaling, Yarn):  # whose ramp is not rounded in these models, which files leave out
        rope = replace(rope, scaling=replace(rope.scaling, truncate=False))
    return header.decoder(layers, [rope], replace(names, roles={**names.roles, "feed_norm": "post_attention_norm"}))


GPT_OSS = Family(
    "GptOssForCausalLM",
    "gpt_oss",
    _from_config,
    heeds=COUNTS,
    unread=frozenset(("experts_per_token", "initial_context_length")),
    gguf="gpt-oss",
    from_header=_from_header,
    gguf_heeds=EXPERT_KEYS | {"attention.sliding_window", "attention.sliding_window_pattern"},
)
