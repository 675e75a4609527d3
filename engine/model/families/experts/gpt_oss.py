"""gpt-oss 20B and 120B: heads with sinks, windows in every other layer, and experts with biases and a clamped gate.

OpenAI (2025), "gpt-oss-120b and gpt-oss-20b model card".
"""

from __future__ import annotations

from dataclasses import replace

from headrace.engine.model.experts import ExpertsFeed
from headrace.engine.model.families.experts.reading import COUNTS, EXPERT_NAMES, expert_size, read_routing
from headrace.engine.model.families.family import Family
from headrace.engine.model.families.hf import HfConfig
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


GPT_OSS = Family("GptOssForCausalLM", "gpt_oss", _from_config, heeds=COUNTS)
