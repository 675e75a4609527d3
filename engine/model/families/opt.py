"""OPT: GPT-2 with positions that begin at row 2 of their table, and ReLU.

Zhang et al. (2022), "OPT: Open pre-trained transformer language models". The model with norms behind mixer and feed,
and with embeddings of another width than the stream (350M), is refused, and left to transformers' module.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from headrace.engine.model.families.family import Family
from headrace.engine.model.families.hf import HF_NAMES, HfConfig
from headrace.engine.model.families.layer_normed import multi_head, plain_feed
from headrace.engine.model.rope import UNROTATED, PositionTable
from headrace.engine.model.spec import DecoderSpec, LayerSpec, Norms

__all__ = ["OPT"]

_OFFSET: Final = 2
_FALLBACK: Final = 'model_impl="transformers" runs others'
_EPSILON: Final = 1e-5
_NAMES = replace(
    HF_NAMES,
    layer_prefix="model.decoder.layers.{}.",
    roles={
        **HF_NAMES.roles,
        "embedding": "model.decoder.embed_tokens",
        "positions": "model.decoder.embed_positions",
        "final_norm": "model.decoder.final_layer_norm",
        "mixer_norm": "self_attn_layer_norm",
        "o": "self_attn.out_proj",
        "feed_norm": "final_layer_norm",
        "up": "fc1",
        "down": "fc2",
    },
)


def _from_config(config: HfConfig) -> DecoderSpec:
    config = config.spelled({"intermediate_size": "ffn_dim", "hidden_act": "activation_function"})
    for field, only in (
        ("do_layer_norm_before", True),
        ("_remove_final_layer_norm", False),
        ("layer_norm_elementwise_affine", True),
    ):
        if config.flag(field, only) is not only:
            config.refuse(field, f"{'true' if only else 'false'}; {_FALLBACK}")
    if config.data.get("word_embed_proj_dim") not in (None, config.hidden_size):
        config.refuse("word_embed_proj_dim", f"the hidden size, {config.hidden_size}; {_FALLBACK}")
    biased = config.flag("enable_bias", True)
    attention = replace(multi_head(config), qkv_bias=biased, o_bias=biased)
    layer = LayerSpec(attention, plain_feed(config, "relu", bias=biased), Norms(_EPSILON, "layer", bias=True))
    spec = config.decoder([layer] * config.num_layers, [UNROTATED], _NAMES, is_tied=True)
    return replace(spec, positions=PositionTable(config.max_context + _OFFSET, _OFFSET))


OPT = Family("OPTForCausalLM", "opt", _from_config)
