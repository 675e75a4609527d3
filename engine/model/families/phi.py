"""Phi-1, Phi-1.5 and Phi-2: mixer and feed side by side behind one layer norm, biases everywhere, the head included.

Li et al. (2023), "Textbooks are all you need II: phi-1.5 technical report". A part of each head is rotated.
"""

from __future__ import annotations

from dataclasses import replace

from headrace.engine.model.families.family import Family
from headrace.engine.model.families.hf import HF_NAMES, HfConfig
from headrace.engine.model.families.layer_normed import layer_norms, plain_feed
from headrace.engine.model.spec import DecoderSpec, LayerSpec

__all__ = ["PHI"]

_NAMES = replace(
    HF_NAMES,
    roles={
        **HF_NAMES.roles,
        "final_norm": "model.final_layernorm",
        "o": "self_attn.dense",
        "up": "mlp.fc1",
        "down": "mlp.fc2",
    },
)


def _from_config(config: HfConfig) -> DecoderSpec:
    attention = config.partly_rotated(replace(config.attention(), qkv_bias=True, o_bias=True), 0.5)
    layer = LayerSpec(attention, plain_feed(config, "gelu_new"), layer_norms(config, placement="shared"))
    spec = config.decoder([layer] * config.num_layers, [config.rope(attention)], _NAMES)
    return replace(spec, head_bias=True)


PHI = Family("PhiForCausalLM", "phi", _from_config, heeds=frozenset(("partial_rotary_factor",)))
