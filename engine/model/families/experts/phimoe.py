"""Phi-3.5-MoE: sixteen experts, of which two are chosen one after the other, layer norms, and biases.

Abdin et al. (2024), "Phi-3 technical report: A highly capable language model locally on your phone"; Liu et al. (2024),
"GRIN: GRadient-INformed MoE", for the choice.
"""

from __future__ import annotations

from dataclasses import replace

from headrace.adapters.untrusted import Fields
from headrace.engine.model.experts import ExpertsFeed
from headrace.engine.model.families.experts.mixtral import MIXTRAL_NAMES
from headrace.engine.model.families.experts.reading import COUNTS, expert_size, read_routing
from headrace.engine.model.families.family import Family
from headrace.engine.model.families.hf import HfConfig
from headrace.engine.model.families.hf_rope import rope_fields
from headrace.engine.model.families.layer_normed import layer_norms
from headrace.engine.model.rope import LongRope, Rope
from headrace.engine.model.spec import Attention, DecoderSpec, LayerSpec
from headrace.ops.routing import Routing

__all__ = ["PHI_MOE"]

_CHOSEN = 2
_NAMES = replace(MIXTRAL_NAMES, later={**MIXTRAL_NAMES.later, "router": "mlp.router"})


def _routing(config: HfConfig) -> Routing:
    routing = read_routing(config, experts=16, top_k=_CHOSEN)
    if routing.top_k != _CHOSEN:
        config.refuse("num_experts_per_tok", _CHOSEN)
    noise = config.real("router_jitter_noise", 0.0, 1e3, 0.01)
    return replace(routing, score="sparsemixer", margin=2 * noise)


def _rope(config: HfConfig, attention: Attention) -> Rope:
    """Return a plain rope, or longrope with the magnitudes that the config gives to short and long contexts."""
    rope = config.rope(attention, 1e6, own=("short_mscale", "long_mscale"))
    name, given = rope_fields(config)
    fields = Fields(given, f"{config.origin}: {name}")
    if rope.scaling is None:
        return rope
    if not isinstance(rope.scaling, LongRope):
        fields.refuse("rope_type" if "rope_type" in given else "type", "default, longrope")
    short, long = (fields.real(f"{length}_mscale", 1e-3, 1e3) for length in ("short", "long"))
    return replace(rope, scaling=replace(rope.scaling, magnitudes=(short, long)))


def _from_config(config: HfConfig) -> DecoderSpec:
    biased = config.flag("attention_bias", False)
    attention = replace(config.attention(kv_heads=8), qkv_bias=biased, o_bias=biased)
    feed = ExpertsFeed(_routing(config), expert_size(config, "intermediate_size", 6400))
    norms = layer_norms(config, "rms_norm_eps")
    windows = config.windows(config.window(default=None))
    layers = (LayerSpec(replace(attention, window=window), feed, norms) for window in windows)
    spec = config.decoder(layers, [_rope(config, attention)], _NAMES)
    return replace(spec, head_bias=config.flag("lm_head_bias", False))


PHI_MOE = Family("PhimoeForCausalLM", "phimoe", _from_config, heeds=COUNTS)
