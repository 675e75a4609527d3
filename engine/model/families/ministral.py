"""Ministral 8B: Mistral with an attention window in the layers that `layer_types` names.

Mistral AI (2024), "Un Ministral, des Ministraux". The files of these models may call themselves Mistral, too.
"""

from __future__ import annotations

from dataclasses import replace

from headrace.engine.model.families.family import Family
from headrace.engine.model.families.hf import HfConfig
from headrace.engine.model.spec import DecoderSpec, LayerSpec

__all__ = ["MINISTRAL"]


def _from_config(config: HfConfig) -> DecoderSpec:
    attention, feed, norms = config.attention(kv_heads=8), config.dense(), config.norms()
    windows = config.windows(config.window(default=4096), types_decide=True)
    layers = (LayerSpec(replace(attention, window=window), feed, norms) for window in windows)
    return config.decoder(layers, [config.rope(attention)])


MINISTRAL = Family("MinistralForCausalLM", "ministral", _from_config)
