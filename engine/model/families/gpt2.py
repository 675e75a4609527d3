"""GPT-2: learned positions, layer norms, biases everywhere, and a feed without a gate.

Radford et al. (2019), "Language models are unsupervised multitask learners". Matrices are stored [in, out], with
queries, keys and values in one. The oldest checkpoints hold masks of attention, and names without `transformer.`.
"""

from __future__ import annotations

import re
from dataclasses import replace

from headrace.engine.model.families.family import Family
from headrace.engine.model.families.hf import HfConfig
from headrace.engine.model.families.layer_normed import layer_norms, multi_head, plain_feed
from headrace.engine.model.roles import Names
from headrace.engine.model.rope import UNROTATED, PositionTable
from headrace.engine.model.spec import DecoderSpec, LayerSpec

__all__ = ["GPT2"]

_SPELLING = {
    "hidden_size": "n_embd",
    "num_hidden_layers": "n_layer",
    "num_attention_heads": "n_head",
    "max_position_embeddings": "n_positions",
    "intermediate_size": "n_inner",
    "hidden_act": "activation_function",
}
_NAMES = Names(
    layer_prefix="transformer.h.{}.",
    roles={
        "embedding": "transformer.wte",
        "positions": "transformer.wpe",
        "final_norm": "transformer.ln_f",
        "head": "lm_head",
        "mixer_norm": "ln_1",
        "qkv": "attn.c_attn",
        "o": "attn.c_proj",
        "feed_norm": "ln_2",
        "up": "mlp.c_fc",
        "down": "mlp.c_proj",
    },
    harmless=re.compile(r"(transformer\.)?h\.\d+\.attn\.(masked_)?bias"),
    joined={"qkv": ("q", "k", "v")},
    transposed=frozenset(("qkv", "o", "up", "down")),
    prefix="transformer.",
)


def _from_config(config: HfConfig) -> DecoderSpec:
    config = config.spelled(_SPELLING)
    attention = replace(multi_head(config), qkv_bias=True, o_bias=True)
    if not config.flag("scale_attn_weights", True):
        attention = replace(attention, scale=1.0)
    layer = LayerSpec(attention, plain_feed(config, "gelu_new"), layer_norms(config, "layer_norm_epsilon"))
    spec = config.decoder([layer] * config.num_layers, [UNROTATED], _NAMES, is_tied=True)
    return replace(spec, positions=PositionTable(config.max_context))


GPT2 = Family("GPT2LMHeadModel", "gpt2", _from_config, unread=frozenset(("n_ctx",)), headless="GPT2Model")
