"""Mistral 7B: Llama with an attention window in every layer.

Jiang et al. (2023), "Mistral 7B". Models from v0.2 on have no window. GGUF files of Mistral call themselves `llama`.
"""

from __future__ import annotations

from dataclasses import replace

from headrace.engine.model.families.family import Family
from headrace.engine.model.families.hf import HfConfig
from headrace.engine.model.spec import DecoderSpec, LayerSpec

__all__ = ["MISTRAL"]


def _from_config(config: HfConfig) -> DecoderSpec:
    attention, feed, norms = config.attention(kv_heads=8), config.dense(), config.norms()
    windows = config.windows(config.window(default=4096))
    layers = (LayerSpec(replace(attention, window=window), feed, norms) for window in windows)
    return config.decoder(layers, [config.rope(attention)])


MISTRAL = Family("MistralForCausalLM", "mistral", _from_config)
