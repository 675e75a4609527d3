"""Published configs of models with layer norms are read, and what is not computed of them is refused by name."""

from __future__ import annotations

import copy
import json
from dataclasses import replace
from typing import Any

import pytest
import transformers

from headrace.engine.errors import ModelRejected
from headrace.engine.model.families.registry import from_hf
from headrace.engine.model.rope import UNROTATED, PositionTable
from headrace.engine.model.spec import Attention, DecoderSpec, DenseFeed, Norms, PlainFeed

STARCODER2 = {
    "architectures": ["Starcoder2ForCausalLM"],
    "attention_dropout": 0.1,
    "attention_softmax_in_fp32": True,
    "bos_token_id": 0,
    "embedding_dropout": 0.1,
    "eos_token_id": 0,
    "hidden_act": "gelu_pytorch_tanh",
    "hidden_size": 3072,
    "initializer_range": 0.018042,
    "intermediate_size": 12288,
    "layer_norm_epsilon": 1e-05,
    "max_position_embeddings": 16384,
    "mlp_type": "default",
    "model_type": "starcoder2",
    "norm_epsilon": 1e-05,
    "norm_type": "layer_norm",
    "num_attention_heads": 24,
    "num_hidden_layers": 30,
    "num_key_value_heads": 2,
    "residual_dropout": 0.1,
    "rope_theta": 999999.4420358813,
    "scale_attention_softmax_in_fp32": True,
    "scale_attn_weights": True,
    "sliding_window": 4096,
    "torch_dtype": "bfloat16",
    "use_bias": True,
    "use_cache": True,
    "vocab_size": 49152,
}
GPT2 = {
    "activation_function": "gelu_new",
    "architectures": ["GPT2LMHeadModel"],
    "attn_pdrop": 0.1,
    "bos_token_id": 50256,
    "embd_pdrop": 0.1,
    "eos_token_id": 50256,
    "initializer_range": 0.02,
    "layer_norm_epsilon": 1e-05,
    "model_type": "gpt2",
    "n_ctx": 1024,
    "n_embd": 768,
    "n_head": 12,
    "n_layer": 12,
    "n_positions": 1024,
    "resid_pdrop": 0.1,
    "summary_activation": None,
    "summary_type": "cls_index",
    "task_specific_params": {"text-generation": {"do_sample": True, "max_length": 50}},
    "vocab_size": 50257,
}
OPT = {
    "activation_dropout": 0.0,
    "activation_function": "relu",
    "architectures": ["OPTForCausalLM"],
    "attention_dropout": 0.0,
    "bos_token_id": 2,
    "do_layer_norm_before": True,
    "dropout": 0.1,
    "eos_token_id": 2,
    "ffn_dim": 3072,
    "hidden_size": 768,
    "init_std": 0.02,
    "layerdrop": 0.0,
    "max_position_embeddings": 2048,
    "model_type": "opt",
    "num_attention_heads": 12,
    "num_hidden_layers": 12,
    "pad_token_id": 1,
    "prefix": "</s>",
    "torch_dtype": "float16",
    "use_cache": True,
    "vocab_size": 50272,
    "word_embed_proj_dim": 768,
}
FALCON = {
    "alibi": False,
    "apply_residual_connection_post_layernorm": False,
    "architectures": ["FalconForCausalLM"],
    "attention_dropout": 0.0,
    "auto_map": {"AutoModelForCausalLM": "modeling_falcon.FalconForCausalLM"},
    "bias": False,
    "bos_token_id": 11,
    "eos_token_id": 11,
    "hidden_dropout": 0.0,
    "hidden_size": 4544,
    "initializer_range": 0.02,
    "layer_norm_epsilon": 1e-05,
    "model_type": "falcon",
    "multi_query": True,
    "new_decoder_architecture": False,
    "num_attention_heads": 71,
    "num_hidden_layers": 32,
    "parallel_attn": True,
    "torch_dtype": "bfloat16",
    "use_cache": True,
    "vocab_size": 65024,
}
FALCON_40B = FALCON | {
    "hidden_size": 8192,
    "multi_query": True,
    "new_decoder_architecture": True,
    "num_attention_heads": 128,
    "num_hidden_layers": 60,
    "num_kv_heads": 8,
}
COHERE2 = {
    "architectures": ["Cohere2ForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 5,
    "cache_implementation": "hybrid",
    "eos_token_id": 255001,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "initializer_range": 0.02,
    "intermediate_size": 14336,
    "layer_norm_eps": 1e-05,
    "layer_switch": 4,
    "logit_scale": 0.25,
    "max_position_embeddings": 8192,
    "model_type": "cohere2",
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "order_of_interleaved_layers": "local_attn_first",
    "pad_token_id": 0,
    "position_embedding_type": "rope_gptj",
    "rope_scaling": None,
    "rope_theta": 50000,
    "rotary_pct": 1.0,
    "sliding_window": 4096,
    "sliding_window_pattern": 4,
    "torch_dtype": "bfloat16",
    "use_cache": True,
    "use_embedding_sharing": True,
    "use_gated_activation": True,
    "use_parallel_block": True,
    "use_parallel_embedding": True,
    "vocab_size": 256000,
}
PYTHIA = {
    "architectures": ["GPTNeoXForCausalLM"],
    "bos_token_id": 0,
    "eos_token_id": 0,
    "hidden_act": "gelu",
    "hidden_size": 768,
    "initializer_range": 0.02,
    "intermediate_size": 3072,
    "layer_norm_eps": 1e-05,
    "max_position_embeddings": 2048,
    "model_type": "gpt_neox",
    "num_attention_heads": 12,
    "num_hidden_layers": 12,
    "rotary_emb_base": 20000,
    "rotary_pct": 0.25,
    "tie_word_embeddings": False,
    "torch_dtype": "float16",
    "use_cache": True,
    "use_parallel_residual": True,
    "vocab_size": 50304,
}
PHI2 = {
    "architectures": ["PhiForCausalLM"],
    "attention_dropout": 0.0,
    "bos_token_id": 50256,
    "embd_pdrop": 0.0,
    "eos_token_id": 50256,
    "hidden_act": "gelu_new",
    "hidden_size": 2560,
    "initializer_range": 0.02,
    "intermediate_size": 10240,
    "layer_norm_eps": 1e-05,
    "max_position_embeddings": 2048,
    "model_type": "phi",
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 32,
    "partial_rotary_factor": 0.4,
    "qk_layernorm": False,
    "resid_pdrop": 0.1,
    "rope_scaling": None,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "float16",
    "use_cache": True,
    "vocab_size": 51200,
}
STABLELM2 = {
    "architectures": ["StableLmForCausalLM"],
    "attention_dropout": 0.0,
    "bos_token_id": 100257,
    "eos_token_id": 100257,
    "hidden_act": "silu",
    "hidden_dropout": 0.0,
    "hidden_size": 2048,
    "initializer_range": 0.02,
    "intermediate_size": 5632,
    "layer_norm_eps": 1e-05,
    "max_position_embeddings": 4096,
    "model_type": "stablelm",
    "num_attention_heads": 32,
    "num_hidden_layers": 24,
    "num_key_value_heads": 32,
    "partial_rotary_factor": 0.25,
    "qk_layernorm": False,
    "rope_scaling": None,
    "rope_theta": 10000,
    "tie_word_embeddings": False,
    "torch_dtype": "float16",
    "use_cache": True,
    "use_parallel_residual": False,
    "use_qkv_bias": True,
    "vocab_size": 100352,
}
PUBLISHED = {
    "starcoder2-3b": STARCODER2,
    "gpt2": GPT2,
    "opt-125m": OPT,
    "falcon-7b": FALCON,
    "falcon-40b": FALCON_40B,
    "c4ai-command-r7b": COHERE2,
    "pythia": PYTHIA,
    "phi-2": PHI2,
    "stablelm-2-1_6b": STABLELM2,
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_configs_are_read_as_transformers_reads_them(name: str) -> None:
    """What transformers saves of a config says the same, with its own defaults in place of what the first left out."""
    config = PUBLISHED[name]
    spec = from_hf(config)
    mapping = transformers.MODEL_FOR_CAUSAL_LM_MAPPING
    kind = next(each for each in mapping if each.model_type == config["model_type"])
    known = kind(**copy.deepcopy({field: value for field, value in config.items() if field != "auto_map"}))
    known.architectures = config["architectures"]
    again = from_hf(json.loads(known.to_json_string()))
    assert again == replace(spec, checkpoint_dtype=again.checkpoint_dtype)


def mixer(spec: DecoderSpec) -> Attention:
    return spec.uniform_attention


def test_sizes_of_published_models() -> None:
    specs = {name: from_hf(config) for name, config in PUBLISHED.items()}
    assert specs["gpt2"].positions == PositionTable(1024) and specs["opt-125m"].positions == PositionTable(2050, 2)
    assert specs["gpt2"].ropes == specs["opt-125m"].ropes == (UNROTATED,)
    assert specs["gpt2"].layers[0].feed == PlainFeed(3072, True, "gelu_tanh")
    assert specs["falcon-7b"].layers[0].feed == PlainFeed(4 * 4544, False, "gelu")
    assert (mixer(specs["falcon-7b"]).heads, mixer(specs["falcon-7b"]).kv_heads) == (71, 1)
    assert mixer(specs["falcon-40b"]).kv_heads == 8 and specs["falcon-7b"].max_context == 2048
    placements = {name: spec.layers[0].norms.placement for name, spec in specs.items()}
    assert placements == {
        "starcoder2-3b": "pre",
        "gpt2": "pre",
        "opt-125m": "pre",
        "falcon-7b": "shared",
        "falcon-40b": "parallel",
        "c4ai-command-r7b": "shared",
        "pythia": "parallel",
        "phi-2": "shared",
        "stablelm-2-1_6b": "pre",
    }
    assert {spec.layers[0].norms.kind for spec in specs.values()} == {"layer"}
    assert not specs["c4ai-command-r7b"].layers[0].norms.bias and specs["phi-2"].head_bias
    assert specs["c4ai-command-r7b"].windows == (4096, 4096, 4096, None) * 8
    assert [layer.mixer.rope for layer in specs["c4ai-command-r7b"].layers[:4]] == [0, 0, 0, 1]
    assert specs["c4ai-command-r7b"].logits_scale == 0.25
    rotated = {name: mixer(specs[name]).rotated_dim for name in ("pythia", "phi-2", "stablelm-2-1_6b")}
    assert rotated == {"pythia": 16, "phi-2": 32, "stablelm-2-1_6b": 16} and specs["pythia"].ropes[0].theta == 20000
    assert specs["stablelm-2-1_6b"].layers[0].feed == DenseFeed(5632)


@pytest.mark.parametrize(
    ("config", "change", "field"),
    [
        (STARCODER2, {"hidden_act": "silu"}, "hidden_act"),
        (STARCODER2, {"hidden_act": ["gelu"]}, "hidden_act"),
        (GPT2, {"activation_function": "swish"}, "activation_function"),
        (GPT2, {"n_embd": 770}, "n_embd"),
        (GPT2, {"n_head": None}, "n_head"),
        (GPT2, {"n_positions": 0}, "n_positions"),
        (GPT2, {"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx"),
        (GPT2, {"add_cross_attention": True}, "add_cross_attention"),
        (OPT, {"do_layer_norm_before": False}, "do_layer_norm_before"),
        (OPT, {"_remove_final_layer_norm": True}, "_remove_final_layer_norm"),
        (OPT, {"word_embed_proj_dim": 512}, "word_embed_proj_dim"),
        (OPT, {"layer_norm_elementwise_affine": False}, "layer_norm_elementwise_affine"),
        (OPT, {"ffn_dim": "wide"}, "ffn_dim"),
        (FALCON, {"alibi": True}, "alibi"),
        (FALCON, {"num_kv_heads": 3}, "num_kv_heads"),
        (FALCON_40B, {"parallel_attn": False}, "parallel_attn"),
        (FALCON_40B, {"num_ln_in_parallel_attn": 3}, "num_ln_in_parallel_attn"),
        (COHERE2, {"use_parallel_block": False}, "use_parallel_block"),
        (COHERE2, {"position_embedding_type": "learned"}, "position_embedding_type"),
        (COHERE2, {"use_qk_norm": True}, "use_qk_norm"),
        (COHERE2, {"logit_scale": "much"}, "logit_scale"),
        (PYTHIA, {"rotary_pct": 0.02}, "rotary_pct"),
        (PYTHIA, {"rotary_emb_base": 0}, "rope_theta"),
        (PHI2, {"qk_layernorm": True}, "qk_layernorm"),
        (STABLELM2, {"layer_norm_eps": -1.0}, "layer_norm_eps"),
        (STABLELM2, {"rope_scaling": {"type": "other", "factor": 2.0}}, "rope_type"),
    ],
)
def test_what_is_not_computed_is_refused_by_the_configs_own_name(
    config: dict[str, Any], change: dict[str, Any], field: str
) -> None:
    with pytest.raises(ModelRejected) as caught:
        from_hf(config | change)
    assert caught.value.field == field and "config.json" in str(caught.value)


def test_fields_of_these_families_are_refused_in_others() -> None:
    llama = {"architectures": ["LlamaForCausalLM"], "vocab_size": 96, "hidden_size": 64, "intermediate_size": 112}
    llama |= {"num_hidden_layers": 2, "num_attention_heads": 4, "max_position_embeddings": 128}
    from_hf(llama)
    for field in ("use_parallel_residual", "new_decoder_architecture", "parallel_attn", "qk_layernorm"):
        with pytest.raises(ModelRejected, match=field):
            from_hf({**llama, field: True})


def test_layer_norms_of_results_cannot_be_described() -> None:
    with pytest.raises(ValueError, match="layer"):
        Norms(1e-5, "layer", "post")
