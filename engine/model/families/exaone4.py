"""EXAONE 4: Llama with norms behind mixer and feed and norms of query and key heads.

LG AI Research (2025), "EXAONE 4.0". Models with windows attend without positions in the layers that have none.
"""

from __future__ import annotations

from dataclasses import replace

from headrace.engine.model.families.family import Family
from headrace.engine.model.families.gguf import GgufHeader
from headrace.engine.model.families.hf import HfConfig
from headrace.engine.model.families.olmo2 import POST_NAMES
from headrace.engine.model.rope import UNROTATED
from headrace.engine.model.spec import DecoderSpec, LayerSpec

__all__ = ["EXAONE4"]


def _from_config(config: HfConfig) -> DecoderSpec:
    attention = replace(config.attention(), qk_norm=True)
    feed, norms = config.dense(), config.norms(1e-5, placement="post")
    window = config.window(default=4096)
    layers = (
        LayerSpec(replace(attention, window=each, rope=int(window is not None and each is None)), feed, norms)
        for each in config.windows(window, _usual(config), types_decide=True)
    )
    return config.decoder(layers, [config.rope(attention), UNROTATED], POST_NAMES)


def _usual(config: HfConfig) -> list[bool]:
    """Return whether each layer has a window, by a pattern such as 4 or `LLLG`, whose last place has none."""
    pattern, count = config.data.get("sliding_window_pattern"), config.num_layers
    if isinstance(pattern, str) and 1 <= len(pattern) <= count and set(pattern[:-1]) <= {"L"} and pattern[-1] == "G":
        period = len(pattern)
    elif isinstance(pattern, str):
        config.refuse("sliding_window_pattern", "a number, or a row of L with one G at its end")
    else:
        period = config.size("sliding_window_pattern", 1 << 20, 4) if pattern else 4
    return [(layer + 1) % period != 0 for layer in range(count)]


def _from_header(header: GgufHeader) -> DecoderSpec:
    attention = replace(header.attention(), qk_norm=True)
    feed, norms, window = header.dense(), header.norms("post"), header.window()
    layers = (
        LayerSpec(replace(attention, window=each, rope=int(window is not None and each is None)), feed, norms)
        for each in header.windows(window, 4)
    )
    return header.decoder(layers, [header.rope(attention), UNROTATED])


EXAONE4 = Family(
    "Exaone4ForCausalLM",
    "exaone4",
    _from_config,
    gguf="exaone4",
    from_header=_from_header,
    gguf_heeds=frozenset(("attention.sliding_window", "attention.sliding_window_pattern")),
)
