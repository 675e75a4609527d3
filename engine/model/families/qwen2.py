"""Qwen2 and Qwen2.5: Llama with biases of queries, keys and values, and perhaps windows in the later layers.

Yang et al. (2024), "Qwen2 technical report".
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Final

from headrace.adapters.untrusted import Fields
from headrace.engine.model.families.family import Family
from headrace.engine.model.families.gguf import GgufHeader
from headrace.engine.model.families.hf import HfConfig
from headrace.engine.model.spec import LIMITS, DecoderSpec, LayerSpec

__all__ = ["QWEN2", "qwen_windows"]

_CHUNKS: Final = "dual_chunk_attention_config"
_FULL_LAYERS = 28  # the default of `max_window_layers`


def qwen_windows(config: HfConfig) -> tuple[int | None, ...]:
    """Return the window of each layer: with `use_sliding_window`, layers from `max_window_layers` on have one.

    `layer_types` may choose other layers.
    """
    window = config.window(default=4096) if config.flag("use_sliding_window", False) else None
    first = config.data.get("max_window_layers", _FULL_LAYERS)
    if window is None:
        return config.windows()
    if isinstance(first, bool) or not isinstance(first, int) or first < 0:
        config.refuse("max_window_layers", "an integer of at least 0")
    return config.windows(window, [layer >= first for layer in range(config.num_layers)], types_decide=True)


def _unchunked(config: HfConfig) -> HfConfig:
    """Return a config whose context is as long as positions are plain: Qwen2.5-1M computes others in longer ones."""
    given = config.data.get(_CHUNKS)
    if given is None:
        return config
    if not isinstance(given, Mapping):
        config.refuse(_CHUNKS, "an object")
    chunks, most = Fields(given, f"{config.origin}: {_CHUNKS}"), LIMITS["max_context"]
    size, local = chunks.size("chunk_size", most), chunks.size("local_size", most)
    if size <= local:
        chunks.refuse("chunk_size", f"more than local_size, which is {local}")
    context = min(config.max_context, size - local)
    return replace(config, data=config.data.changed({"max_position_embeddings": context}))


def _from_config(config: HfConfig) -> DecoderSpec:
    config = _unchunked(config)
    attention = replace(config.attention(), qkv_bias=True)
    feed, norms = config.dense(), config.norms()
    windows = qwen_windows(config)
    layers = (LayerSpec(replace(attention, window=window), feed, norms) for window in windows)
    return config.decoder(layers, [config.rope(attention)])


def _from_header(header: GgufHeader) -> DecoderSpec:
    attention = header.attention()
    return header.decoder(LayerSpec(attention, header.dense(), header.norms()), [header.rope(attention)])


QWEN2 = Family(
    "Qwen2ForCausalLM",
    "qwen2",
    _from_config,
    unread=frozenset(("sliding_window",)),
    gguf="qwen2",
    from_header=_from_header,
)
