"""SmolLM3: Llama whose every fourth layer attends without positions.

Bakouch et al. (2025), "SmolLM3: smol, multilingual, long-context reasoner". Layers without rotation among others with
it are from Yang et al. (2025), "Rope to nope and back again".
"""

from __future__ import annotations

from dataclasses import replace

from headrace.engine.model.families.family import Family
from headrace.engine.model.families.gguf import GgufHeader
from headrace.engine.model.families.hf import HfConfig
from headrace.engine.model.rope import UNROTATED
from headrace.engine.model.spec import LIMITS, DecoderSpec, LayerSpec

__all__ = ["SMOLLM3"]

_THETA = 2e6
_INTERVAL = 4  # GGUF files do not say it


def _from_config(config: HfConfig) -> DecoderSpec:
    biased = config.flag("attention_bias", False)
    attention = replace(config.attention(kv_heads=4), qkv_bias=biased, o_bias=biased)
    feed = replace(config.dense(), bias=config.flag("mlp_bias", False))
    norms, rotated = config.norms(), _rotated(config)
    window = config.window(default=None) if config.flag("use_sliding_window", False) else None
    windows = config.windows(window, [not has_rope for has_rope in rotated], types_decide=True)
    layers = (
        LayerSpec(replace(attention, window=window, rope=int(not has_rope)), feed, norms)
        for window, has_rope in zip(windows, rotated, strict=True)
    )
    return config.decoder(layers, [config.rope(attention, _THETA), UNROTATED], is_tied=True)


def _rotated(config: HfConfig) -> list[bool]:
    """Return whether each layer rotates its heads: `no_rope_layers` has a 1 for those that do."""
    given, count = config.data.get("no_rope_layers"), config.num_layers
    if given is None:
        interval = config.size("no_rope_layer_interval", LIMITS["num_layers"], _INTERVAL)
        return [(layer + 1) % interval != 0 for layer in range(count)]
    if not isinstance(given, list) or len(given) < count or any(each not in (0, 1) for each in given):
        config.refuse("no_rope_layers", f"a list of {count} times 0 or 1")
    return [bool(each) for each in given[:count]]


def _from_header(header: GgufHeader) -> DecoderSpec:
    attention, feed, norms = header.attention(), header.dense(), header.norms()
    layers = (
        LayerSpec(replace(attention, rope=int((layer + 1) % _INTERVAL == 0)), feed, norms)
        for layer in range(header.num_layers)
    )
    names = replace(header.names, interleaved=True)
    return header.decoder(layers, [header.rope(attention), UNROTATED], names)


SMOLLM3 = Family(
    "SmolLM3ForCausalLM",
    "smollm3",
    _from_config,
    heeds=frozenset(("no_rope_layers",)),
    unread=frozenset(("max_window_layers", "no_rope_layer_interval", "sliding_window")),
    gguf="smollm3",
    from_header=_from_header,
)
