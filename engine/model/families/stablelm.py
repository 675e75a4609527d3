"""StableLM: Llama with layer norms and a part of each head rotated; perhaps parallel layers and norms of heads.

Bellagente et al. (2024), "Stable LM 2 1.6B technical report". With norms of heads, each head has weights of its own.
"""

from __future__ import annotations

from dataclasses import replace

from headrace.engine.model.families.family import Family
from headrace.engine.model.families.hf import HF_NAMES, HfConfig
from headrace.engine.model.families.layer_normed import layer_norms
from headrace.engine.model.roles import Names, head_norm_roles
from headrace.engine.model.spec import Attention, DecoderSpec, LayerSpec

__all__ = ["STABLELM"]


def _from_config(config: HfConfig) -> DecoderSpec:
    attention = replace(
        config.attention(kv_heads=32),
        qkv_bias=config.flag("use_qkv_bias", False),
        qk_layer_norm=config.flag("qk_layernorm", False),
    )
    attention = config.partly_rotated(attention, 0.25)
    norms = layer_norms(config, placement="shared" if config.flag("use_parallel_residual", False) else "pre")
    layers = [LayerSpec(attention, config.dense(), norms)] * config.num_layers
    return config.decoder(layers, [config.rope(attention)], _names(attention))


def _names(attention: Attention) -> Names:
    """Return the names of a model's tensors, those of the norms of its heads included."""
    norms = head_norm_roles(attention.heads, attention.kv_heads)
    named = {role: "self_attn.{}_layernorm.norms.{}".format(*role.split("_norm_")) for role in norms}
    return replace(HF_NAMES, roles={**HF_NAMES.roles, **named})


STABLELM = Family(
    "StableLmForCausalLM",
    "stablelm",
    _from_config,
    heeds=frozenset(("partial_rotary_factor", "qk_layernorm", "use_parallel_residual")),
    unread=frozenset(("norm_eps", "rope_pct", "rotary_scaling_factor")),
)
