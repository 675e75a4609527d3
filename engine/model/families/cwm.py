"""Code World Model: Llama with windows in three of four layers.

FAIR CodeGen Team (2025), "CWM: An open-weights LLM for research on code generation with world models".
"""

from __future__ import annotations

from dataclasses import replace

from headrace.engine.model.families.family import Family
from headrace.engine.model.families.hf import HfConfig
from headrace.engine.model.families.hf_rope import rope_fields
from headrace.engine.model.rope import Llama3, Rope
from headrace.engine.model.spec import DecoderSpec, LayerSpec

__all__ = ["CWM"]

_THETA = 1e6
_ROPE = Rope(_THETA, Llama3(16.0, 1.0, 4.0, 8192))
"""Rope where a config gives none."""


def _from_config(config: HfConfig) -> DecoderSpec:
    attention, norms = config.attention(kv_heads=8, head_dim=128), config.norms(1e-5)
    feed = replace(config.dense(), bias=config.flag("mlp_bias", False))
    usual = [layer % 4 != 0 for layer in range(config.num_layers)]
    windows = config.windows(config.window(default=8192), usual, types_decide=True)
    layers = (LayerSpec(replace(attention, window=window), feed, norms) for window in windows)
    return config.decoder(layers, [config.rope(attention, _THETA) if rope_fields(config)[1] else _ROPE])


CWM = Family("CwmForCausalLM", "cwm", _from_config)
