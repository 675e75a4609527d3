"""Command R and R+: mixer and feed side by side behind one layer norm without a bias, and a factor of the logits.

Cohere For AI (2024), "C4AI Command R". Checkpoints hold the two elements of each rotated pair side by side. Command
R+ norms each head.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from headrace.engine.model.families.family import Family
from headrace.engine.model.families.hf import HF_NAMES, HfConfig
from headrace.engine.model.families.layer_normed import layer_norms
from headrace.engine.model.roles import head_norm_roles
from headrace.engine.model.spec import Attention, DecoderSpec, LayerSpec

__all__ = ["COHERE", "check_cohere", "cohere_attention", "cohere_layer", "logit_scale"]

_THETA = 5e5
_ONLY: Final[dict[str, str | bool]] = {
    "position_embedding_type": "rope_gptj",
    "use_embedding_sharing": True,
    "use_gated_activation": True,
    "use_parallel_block": True,
}
"""Fields that Cohere's own configs have, and what alone is computed."""


def _from_config(config: HfConfig) -> DecoderSpec:
    check_cohere(config)
    attention = replace(cohere_attention(config), qk_layer_norm=config.flag("use_qk_norm", False))
    config.windows()  # has none, and refuses layer_types that say otherwise
    layers = [cohere_layer(config, attention)] * config.num_layers
    names = replace(HF_NAMES, roles={**HF_NAMES.roles, **_head_norms(attention)})
    spec = config.decoder(layers, [config.rope(attention, _THETA)], names, is_tied=True)
    return replace(spec, logits_scale=logit_scale(config))


def _head_norms(attention: Attention) -> dict[str, str]:
    """Return names of the norms of heads, of which a tensor holds those of all heads (checkpoint/head_norms.py)."""
    roles = head_norm_roles(attention.heads, attention.kv_heads)
    return {role: "self_attn.{}_norm.{}".format(*role.split("_norm_")) for role in roles}


def check_cohere(config: HfConfig) -> None:
    """Refuse a config of Cohere's that asks for a layer of another kind."""
    for field, only in _ONLY.items():
        config.expect(field, only)


def cohere_attention(config: HfConfig) -> Attention:
    """Return attention with the biases that the config asks for."""
    biased = config.flag("attention_bias", False)
    return replace(config.attention(), qkv_bias=biased, o_bias=biased, interleaved=True)


def cohere_layer(config: HfConfig, attention: Attention) -> LayerSpec:
    """Return a layer whose mixer and feed share a layer norm."""
    return LayerSpec(attention, config.dense(), layer_norms(config, placement="shared", bias=False))


def logit_scale(config: HfConfig) -> float:
    """Return the factor of the logits."""
    return config.real("logit_scale", 1e-4, 1e4, 0.0625)


COHERE = Family("CohereForCausalLM", "cohere", _from_config, heeds=frozenset(("logit_scale", "use_qk_norm")))
