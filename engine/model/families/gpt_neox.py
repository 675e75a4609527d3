"""GPT-NeoX and Pythia: mixer and feed side by side, each behind a layer norm of its own, and a part of heads rotated.

Black et al. (2022), "GPT-NeoX-20B"; Biderman et al. (2023), "Pythia". One tensor holds queries, keys and values,
head by head.
"""

from __future__ import annotations

import re
from dataclasses import replace

from headrace.engine.model.families.family import Family
from headrace.engine.model.families.hf import HfConfig
from headrace.engine.model.families.layer_normed import layer_norms, multi_head, plain_feed
from headrace.engine.model.roles import Names
from headrace.engine.model.spec import DecoderSpec, LayerSpec

__all__ = ["GPT_NEOX"]

_SPELLING = {"partial_rotary_factor": "rotary_pct", "rope_theta": "rotary_emb_base"}
_NAMES = Names(
    layer_prefix="gpt_neox.layers.{}.",
    roles={
        "embedding": "gpt_neox.embed_in",
        "final_norm": "gpt_neox.final_layer_norm",
        "head": "embed_out",
        "mixer_norm": "input_layernorm",
        "qkv": "attention.query_key_value",
        "o": "attention.dense",
        "feed_norm": "post_attention_layernorm",
        "up": "mlp.dense_h_to_4h",
        "down": "mlp.dense_4h_to_h",
    },
    harmless=re.compile(r"(gpt_neox\.)?layers\.\d+\.attention\.(bias|masked_bias|rotary_emb\.inv_freq)"),
    joined={"qkv": ("q", "k", "v")},
    grouped=True,
    prefix="gpt_neox.",
)


def _from_config(config: HfConfig) -> DecoderSpec:
    config = config.spelled(_SPELLING)
    biased = config.flag("attention_bias", True)
    attention = config.partly_rotated(replace(multi_head(config), qkv_bias=biased, o_bias=biased), 0.25)
    norms = layer_norms(config, placement="parallel" if config.flag("use_parallel_residual", True) else "pre")
    layer = LayerSpec(attention, plain_feed(config, "gelu"), norms)
    return config.decoder([layer] * config.num_layers, [config.rope(attention)], _NAMES)


GPT_NEOX = Family(
    "GPTNeoXForCausalLM",
    "gpt_neox",
    _from_config,
    heeds=frozenset(("partial_rotary_factor", "rotary_pct", "use_parallel_residual")),
)
