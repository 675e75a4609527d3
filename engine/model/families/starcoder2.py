"""StarCoder 2: layer norms, biases everywhere, and a feed without a gate; perhaps a window in all layers.

Lozhkov et al. (2024), "StarCoder 2 and The Stack v2".
"""

from __future__ import annotations

from dataclasses import replace

from headrace.engine.model.families.family import Family
from headrace.engine.model.families.hf import HF_NAMES, HfConfig
from headrace.engine.model.families.layer_normed import layer_norms, plain_feed
from headrace.engine.model.spec import DecoderSpec, LayerSpec

__all__ = ["STARCODER2"]

_NAMES = replace(HF_NAMES, roles={**HF_NAMES.roles, "up": "mlp.c_fc", "down": "mlp.c_proj"})


def _from_config(config: HfConfig) -> DecoderSpec:
    config.expect("mlp_type", "default")
    config.expect("norm_type", "layer_norm")
    biased = config.flag("use_bias", True)
    attention = replace(config.attention(kv_heads=2), qkv_bias=biased, o_bias=biased)
    feed = plain_feed(config, "gelu_pytorch_tanh", bias=biased)
    norms = layer_norms(config, "norm_epsilon")
    windows = config.windows(config.window(default=None))
    layers = (LayerSpec(replace(attention, window=window), feed, norms) for window in windows)
    return config.decoder(layers, [config.rope(attention)], _NAMES, is_tied=True)


STARCODER2 = Family(
    "Starcoder2ForCausalLM",
    "starcoder2",
    _from_config,
    unread=frozenset(("activation_function", "layer_norm_epsilon")),
)
