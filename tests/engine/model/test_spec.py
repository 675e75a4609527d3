"""Specs say what transformers would compute for every family, and refuse by name what the decoder does not compute."""

from __future__ import annotations

import copy
import importlib
import json
import math
import subprocess
import sys
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.engine.errors import ModelRejected
from headrace.engine.model.experts import ExpertsFeed, SharedExpert
from headrace.engine.model.families.registry import from_gguf, from_hf
from headrace.engine.model.rope import UNROTATED, Linear, Llama3, LongRope, Rope, Yarn
from headrace.engine.model.shared.device import within_context
from headrace.engine.model.spec import Attention, DecoderSpec, DenseFeed, LayerSpec, Norms

SIZES = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 112,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "rms_norm_eps": 3e-5,
}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 128,
}
FAMILIES = {
    "LlamaForCausalLM": transformers.LlamaConfig,
    "MistralForCausalLM": transformers.MistralConfig,
    "MinistralForCausalLM": transformers.MinistralConfig,
    "Qwen2ForCausalLM": transformers.Qwen2Config,
    "Qwen3ForCausalLM": transformers.Qwen3Config,
    "Phi3ForCausalLM": transformers.Phi3Config,
    "GraniteForCausalLM": transformers.GraniteConfig,
    "SmolLM3ForCausalLM": transformers.SmolLM3Config,
    "SeedOssForCausalLM": transformers.SeedOssConfig,
}
EVERY = FAMILIES | {
    "Gemma2ForCausalLM": transformers.Gemma2Config,
    "Gemma3ForCausalLM": transformers.Gemma3TextConfig,
    "Ministral3ForCausalLM": transformers.Ministral3Config,
    "Olmo2ForCausalLM": transformers.Olmo2Config,
    "Olmo3ForCausalLM": transformers.Olmo3Config,
    "Exaone4ForCausalLM": transformers.Exaone4Config,
    "GlmForCausalLM": transformers.GlmConfig,
    "Glm4ForCausalLM": transformers.Glm4Config,
    "Ernie4_5ForCausalLM": transformers.Ernie4_5Config,
    "HunYuanDenseV1ForCausalLM": transformers.HunYuanDenseV1Config,
    "HeliumForCausalLM": transformers.HeliumConfig,
    "GemmaForCausalLM": transformers.GemmaConfig,
    "Starcoder2ForCausalLM": transformers.Starcoder2Config,
    "GPT2LMHeadModel": transformers.GPT2Config,
    "OPTForCausalLM": transformers.OPTConfig,
    "FalconForCausalLM": transformers.FalconConfig,
    "Cohere2ForCausalLM": transformers.Cohere2Config,
    "GPTNeoXForCausalLM": transformers.GPTNeoXConfig,
    "PhiForCausalLM": transformers.PhiConfig,
    "StableLmForCausalLM": transformers.StableLmConfig,
    "Jais2ForCausalLM": transformers.Jais2Config,
    "ArceeForCausalLM": transformers.ArceeConfig,
}
TOKENS: dict[str, Any] = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}
LONG_ROPE = {"rope_type": "longrope", "factor": 4.0, "original_max_position_embeddings": 128}


def saved(config: transformers.PreTrainedConfig, architecture: str) -> dict[str, Any]:
    """The config.json that transformers writes."""
    config.architectures = [architecture]
    found: dict[str, Any] = json.loads(config.to_json_string())
    return found


def llama(**changes: object) -> dict[str, Any]:
    """A Llama config.json in the older spelling."""
    base = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu", "rope_theta": 5e5}
    return {**base, **SIZES, **changes}


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("architecture", FAMILIES)
def test_every_family_reads_as_transformers_saved_it(architecture: str, tied: bool) -> None:
    config = FAMILIES[architecture](**SIZES, **TOKENS, tie_word_embeddings=tied)
    spec = from_hf(saved(config, architecture))
    assert spec.architecture == architecture
    assert (spec.hidden_size, spec.vocab_size, spec.max_context, spec.norm_eps) == (64, 96, 512, 3e-5)
    assert spec.tied_head is tied
    attention = Attention(
        heads=4,
        kv_heads=2,
        head_dim=getattr(config, "head_dim", None) or 16,
        qkv_bias=architecture in ("Qwen2ForCausalLM", "SeedOssForCausalLM"),
        qk_norm=architecture == "Qwen3ForCausalLM",
        scale=1.0 if architecture == "GraniteForCausalLM" else None,
    )
    layers = [LayerSpec(attention, DenseFeed(112), Norms(3e-5))] * 4
    if architecture == "SmolLM3ForCausalLM":
        layers[3] = replace(layers[3], mixer=replace(attention, rope=1))
        assert spec.ropes[1] is UNROTATED
    assert spec.layers == tuple(layers)


@pytest.mark.parametrize("architecture", ["LlamaForCausalLM", "Qwen3ForCausalLM"])
def test_biases_that_the_config_asks_for(architecture: str) -> None:
    spec = from_hf(saved(FAMILIES[architecture](**SIZES, attention_bias=True), architecture))
    attention = spec.uniform_attention
    assert attention.qkv_bias and attention.o_bias and not spec.layers[0].feed.bias and spec.has_biases
    assert from_hf(llama(mlp_bias=True)).layers[0].feed.bias and not from_hf(llama()).has_biases


@pytest.mark.parametrize("scaling", [None, LLAMA3, {"rope_type": "linear", "factor": 3.0}])
@pytest.mark.parametrize("head_dim", [16, 64, 128])
@pytest.mark.parametrize("theta", [10000.0, 500000.0])
def test_frequencies_equal_those_of_transformers(scaling: dict[str, Any] | None, head_dim: int, theta: float) -> None:
    parameters = {"rope_theta": theta, **(scaling or {"rope_type": "default"})}
    config = transformers.LlamaConfig(**SIZES, head_dim=head_dim, rope_parameters=parameters)
    expected = transformers.models.llama.modeling_llama.LlamaRotaryEmbedding(config).inv_freq.numpy()
    (newer,) = from_hf(saved(config, "LlamaForCausalLM")).ropes
    (older,) = from_hf(llama(head_dim=head_dim, rope_theta=theta, rope_scaling=scaling)).ropes
    assert newer == older
    found = newer.inverse_frequencies(head_dim, config.max_position_embeddings)
    assert found.dtype == np.float32 and found.shape == (head_dim // 2,)
    np.testing.assert_allclose(found, expected, rtol=5e-7, atol=0)


def test_llama3_bends_some_frequencies_and_keeps_others() -> None:
    plain = Rope(500000.0).inverse_frequencies(128, 131072)
    bent = Rope(500000.0, Llama3(8.0, 1.0, 4.0, 8192)).inverse_frequencies(128, 131072)
    ratio = bent / plain
    assert ratio[0] == 1 and ratio[-1] == 0.125 and ((ratio > 0.13) & (ratio < 0.99)).any()


@pytest.mark.parametrize(
    "scaling",
    [
        YARN,
        {**YARN, "beta_fast": 16.0, "beta_slow": 2.0, "truncate": False},
        {**YARN, "mscale": 0.7, "mscale_all_dim": 0.4},
        {**YARN, "attention_factor": 0.9},
    ],
)
@pytest.mark.parametrize("head_dim", [16, 128])
def test_yarn_equals_that_of_transformers(scaling: dict[str, Any], head_dim: int) -> None:
    config = transformers.LlamaConfig(**SIZES, head_dim=head_dim, rope_parameters={"rope_theta": 1e4, **scaling})
    expected = transformers.models.llama.modeling_llama.LlamaRotaryEmbedding(config)
    (rope,) = from_hf(saved(config, "LlamaForCausalLM")).ropes
    np.testing.assert_allclose(rope.inverse_frequencies(head_dim, 512), expected.inv_freq.numpy(), rtol=1e-6, atol=0)
    assert rope.magnitude == pytest.approx(expected.attention_scaling, rel=1e-9) != 1.0


@pytest.mark.parametrize("context", [128, 129])
def test_longrope_has_divisors_for_contexts_up_to_the_original_and_beyond(context: int) -> None:
    short, long = ([first + 0.25 * pair for pair in range(8)] for first in (1.0, 2.0))
    parameters = {"rope_theta": 1e4, **LONG_ROPE, "short_factor": short, "long_factor": long}
    config = transformers.Phi3Config(**SIZES, **TOKENS, rope_parameters=parameters)
    make = transformers.modeling_rope_utils.ROPE_INIT_FUNCTIONS["longrope"]
    expected, magnitude = make(config, None, seq_len=context)
    (rope,) = from_hf(saved(config, "Phi3ForCausalLM")).ropes
    np.testing.assert_allclose(rope.inverse_frequencies(16, context), expected.numpy(), rtol=1e-6, atol=0)
    assert rope.magnitude == pytest.approx(magnitude, rel=1e-9) != 1.0


def test_the_older_spellings_of_longrope() -> None:
    """Phi-3's first files say `su` or `yarn`, keep the original context outside, and give no factor."""
    base = {**SIZES, "architectures": ["Phi3ForCausalLM"], "original_max_position_embeddings": 64}
    lists = {"short_factor": [1.0] * 8, "long_factor": [4] * 8}
    (rope,) = {
        from_hf({**base, "rope_scaling": {"type": kind, **lists}}).ropes[0] for kind in ("su", "yarn", "longrope")
    }
    assert rope.scaling == LongRope((1.0,) * 8, (4.0,) * 8, 64)
    assert rope.magnitude == pytest.approx((1 + np.log(512 / 64) / np.log(64)) ** 0.5)


def test_yarn_lengthens_the_context_of_a_config_that_leaves_that_out() -> None:
    scaling = {"rope_type": "yarn", "factor": 4.0}
    assert from_hf(llama(rope_scaling=scaling)).max_context == 4 * 512
    assert from_hf(llama(rope_scaling={**scaling, "original_max_position_embeddings": 128})).max_context == 512


def test_granites_factors_become_those_of_embeddings_and_logits_and_an_epsilon() -> None:
    factors = {"embedding_multiplier": 12.0, "residual_multiplier": 0.5, "logits_scaling": 8.0}
    config = transformers.GraniteConfig(**SIZES, **factors, attention_multiplier=0.125)
    spec = from_hf(saved(config, "GraniteForCausalLM"))
    assert (spec.embedding_scale, spec.logits_scale, spec.uniform_attention.scale) == (24.0, 0.125, 0.125)
    assert spec.uniform_epsilon == pytest.approx(4 * 3e-5)


def granite4(**changes: Any) -> dict[str, Any]:
    """A Granite 4 config.json, dense and with attention in all layers."""
    sizes = {"num_local_experts": 0, "shared_intermediate_size": 112, "layer_types": ["attention"] * 4}
    config = transformers.GraniteMoeHybridConfig(**SIZES, **TOKENS, **sizes)
    return {**saved(config, "GraniteMoeHybridForCausalLM"), **changes}


def test_granite_4_has_the_feed_that_models_with_experts_share_and_rotates_heads_where_it_says_so() -> None:
    spec = from_hf(granite4(position_embedding_type="rope"))
    granite = saved(transformers.GraniteConfig(**SIZES, **TOKENS), "GraniteForCausalLM")
    assert replace(spec, architecture="", names=None) == replace(from_hf(granite), architecture="", names=None)
    assert from_hf(granite4(layer_types=["attention"] * 4)) == from_hf(granite4(position_embedding_type="nope"))
    assert from_hf(granite4()).ropes == (UNROTATED,) != spec.ropes
    assert from_hf(granite4(intermediate_size=7, num_experts_per_tok=0)) == from_hf(granite4())
    with_experts = from_hf(granite4(num_local_experts=6, intermediate_size=48)).layers[3].feed
    assert isinstance(with_experts, ExpertsFeed) and with_experts.shared == SharedExpert(112)
    assert (with_experts.size, with_experts.routing.experts, with_experts.routing.top_k) == (48, 6, 2)


@pytest.mark.parametrize(
    ("changes", "field", "value"),
    [
        ({"layer_types": ["attention", "mamba"] * 2}, "layer_types", "mamba"),
        ({"layer_types": ["full_attention"] * 3 + ["linear_attention"]}, "layer_types", "linear_attention"),
        ({"layer_types": None}, "layer_types", None),
        ({"layer_types": ["attention"] * 3}, "layer_types", ["attention"] * 3),
        ({"position_embedding_type": "alibi"}, "position_embedding_type", "alibi"),
        ({"normalization_function": "layernorm"}, "normalization_function", "layernorm"),
        ({"num_experts": 8}, "num_experts", 8),
        ({"num_local_experts": False}, "num_local_experts", False),
        ({"num_local_experts": 0.0}, "num_local_experts", 0.0),
    ],
)
def test_what_no_granite_4_may_say(changes: dict[str, Any], field: str, value: object) -> None:
    with pytest.raises(ModelRejected) as caught:
        from_hf(granite4(**changes))
    assert (caught.value.field, caught.value.value) == (field, value)


@pytest.mark.parametrize("has_lists", [False, True])
def test_smollm3_windows_and_unrotated_layers(has_lists: bool) -> None:
    options: dict[str, Any] = {"use_sliding_window": True, "sliding_window": 32, "no_rope_layer_interval": 2}
    data = saved(transformers.SmolLM3Config(**SIZES, **TOKENS, **options), "SmolLM3ForCausalLM")
    if not has_lists:
        del data["layer_types"], data["no_rope_layers"]
    spec = from_hf(data)
    assert spec.windows == (None, 32, None, 32)
    assert [kind.rope for kind in spec.attention_kinds] == [0, 1]


def test_what_newer_files_leave_out_is_what_transformers_takes() -> None:
    smollm3 = saved(transformers.SmolLM3Config(**SIZES, **TOKENS), "SmolLM3ForCausalLM")
    del smollm3["tie_word_embeddings"]
    assert from_hf(smollm3).tied_head
    gemma2 = saved(transformers.Gemma2Config(**{**SIZES, "num_attention_heads": 8}), "Gemma2ForCausalLM")
    del gemma2["num_key_value_heads"]
    assert from_hf(gemma2).uniform_attention.kv_heads == transformers.Gemma2Config().num_key_value_heads


@pytest.mark.parametrize(
    "code",
    [
        {"AutoConfig": "configuration_phi3.Phi3Config", "AutoModelForCausalLM": "modeling_phi3.Phi3ForCausalLM"},
        {"AutoModel": "microsoft/phi--modeling_phi3.Phi3Model", "AutoTokenizer": "Xenova/gpt-4o"},
        {"AutoConfig": "configuration.Mine"},
    ],
)
def test_code_of_the_familys_own_class_is_not_needed(code: dict[str, str]) -> None:
    """Checkpoints that are older than transformers' class name their own one of the same name beside it."""
    data = saved(transformers.Phi3Config(**SIZES, **TOKENS), "Phi3ForCausalLM")
    assert from_hf({**data, "auto_map": code}) == from_hf(data)


@pytest.mark.parametrize(
    "code",
    [
        {"AutoModelForCausalLM": "modeling_phi3.Phi3SmallForCausalLM", "AutoModel": "modeling_phi3.Phi3Model"},
        {"AutoModelForCausalLM": ["modeling_phi3.Phi3ForCausalLM"]},
        ["modeling_phi3.Phi3ForCausalLM"],
    ],
)
def test_code_of_another_class_is_refused(code: object) -> None:
    data = saved(transformers.Phi3Config(**SIZES, **TOKENS), "Phi3ForCausalLM")
    with pytest.raises(ModelRejected) as caught:
        from_hf({**data, "auto_map": code})
    assert caught.value.field == "auto_map"


def test_a_window_counts_where_yarn_makes_the_context_longer() -> None:
    yarn = {"rope_type": "yarn", "factor": 4.0}
    data = saved(transformers.MistralConfig(**SIZES, sliding_window=512), "MistralForCausalLM")
    assert from_hf(data).windows == (None,) * 4
    stretched = from_hf({**data, "rope_parameters": {"rope_theta": 1e4, **yarn}})
    assert (stretched.windows, stretched.max_context) == ((512,) * 4, 2048)


def test_gemma3_without_a_head_has_a_name_of_its_own() -> None:
    data = saved(transformers.Gemma3TextConfig(**SIZES), "Gemma3TextModel")
    assert not from_hf(data).has_head


def test_gemma_heads_are_tied_and_its_embedding_scale_is_rounded_as_the_weights_are() -> None:
    data = saved(transformers.Gemma3TextConfig(**{**SIZES, "hidden_size": 72}), "Gemma3ForCausalLM")
    del data["tie_word_embeddings"]
    assert from_hf({**data, "dtype": None}).tied_head
    assert from_hf({**data, "dtype": "float32"}).embedding_scale == 72**0.5
    for dtype in ({"dtype": "bfloat16"}, {"dtype": None, "torch_dtype": "bfloat16"}):
        assert from_hf({**data, **dtype}).embedding_scale == float(torch.tensor(72**0.5).bfloat16())


def test_exaones_pattern_stands_in_for_types_of_layers() -> None:
    data = saved(transformers.Exaone4Config(**SIZES, sliding_window=32), "Exaone4ForCausalLM")
    del data["layer_types"]
    for pattern in (2, "LG"):
        spec = from_hf({**data, "sliding_window_pattern": pattern})
        assert spec.windows == (32, None, 32, None)
        assert [layer.mixer.rope for layer in spec.layers if isinstance(layer.mixer, Attention)] == [0, 1, 0, 1]
    with pytest.raises(ModelRejected, match="sliding_window_pattern"):
        from_hf({**data, "sliding_window_pattern": "GL"})


GLM4_9B = {
    "architectures": ["Glm4ForCausalLM"],
    "attention_bias": True,
    "attention_dropout": 0.0,
    "eos_token_id": [151329, 151336, 151338],
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "initializer_range": 0.02,
    "intermediate_size": 13696,
    "max_position_embeddings": 32768,
    "model_type": "glm4",
    "num_attention_heads": 32,
    "num_hidden_layers": 40,
    "num_key_value_heads": 2,
    "pad_token_id": 151329,
    "partial_rotary_factor": 0.5,
    "rms_norm_eps": 1e-05,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "use_cache": True,
    "vocab_size": 151552,
}
GLM_9B = GLM4_9B | {
    "architectures": ["GlmForCausalLM"],
    "model_type": "glm",
    "max_position_embeddings": 131072,
    "num_key_value_heads": 4,
    "rms_norm_eps": 1.5625e-07,
}
PHI4_MINI = {
    "architectures": ["Phi3ForCausalLM"],
    "attention_bias": False,
    "auto_map": {"AutoModelForCausalLM": "modeling_phi3.Phi3ForCausalLM"},
    "bos_token_id": 199999,
    "embd_pdrop": 0.0,
    "eos_token_id": 199999,
    "full_attn_mod": 1,
    "hidden_act": "silu",
    "hidden_size": 3072,
    "intermediate_size": 8192,
    "interpolate_factor": 1,
    "lm_head_bias": False,
    "max_position_embeddings": 131072,
    "mlp_bias": False,
    "model_type": "phi3",
    "num_attention_heads": 24,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "original_max_position_embeddings": 4096,
    "pad_token_id": 199999,
    "partial_rotary_factor": 0.75,
    "rms_norm_eps": 1e-05,
    "rope_scaling": {"long_factor": [1.5] * 48, "short_factor": [1.0] * 48, "type": "longrope"},
    "rope_theta": 10000.0,
    "sliding_window": 262144,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "vocab_size": 200064,
}
ERNIE = {
    "architectures": ["Ernie4_5_ForCausalLM"],
    "auto_map": {"AutoModelForCausalLM": "modeling_ernie4_5.Ernie4_5_ForCausalLM"},
    "bos_token_id": 1,
    "eos_token_id": 2,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "max_position_embeddings": 131072,
    "model_type": "ernie4_5",
    "num_attention_heads": 16,
    "num_hidden_layers": 18,
    "num_key_value_heads": 2,
    "pad_token_id": 0,
    "rms_norm_eps": 1e-05,
    "rope_theta": 500000,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "use_bias": False,
    "use_cache": False,
    "vocab_size": 103424,
}
HUNYUAN = {
    "add_classification_head": False,
    "architectures": ["HunYuanDenseV1ForCausalLM"],
    "attention_bias": False,
    "attention_head_dim": 128,
    "cla_share_factor": 2,
    "class_num": 0,
    "dense_list": [1024, 0],
    "eod_token_id": 127967,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 1024,
    "intermediate_size": 3584,
    "max_position_embeddings": 262144,
    "mlp_bias": False,
    "model_type": "hunyuan_v1_dense",
    "norm_type": "rms",
    "num_attention_heads": 16,
    "num_experts": 1,
    "num_hidden_layers": 24,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "alpha": 1000.0,
        "beta_fast": 32,
        "beta_slow": 1,
        "factor": 1.0,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "type": "dynamic",
    },
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "use_cla": False,
    "use_qk_norm": True,
    "use_rotary_pos_emb": True,
    "vocab_size": 120818,
}


def test_queries_grow_as_in_transformers_unless_no_context_is_long_enough() -> None:
    from transformers.models.ministral3.modeling_ministral3 import get_llama_4_attn_scale

    spec = from_hf(saved(transformers.Ministral3Config(), "Ministral3ForCausalLM"))
    growth = spec.uniform_attention.growth
    assert growth is not None and (growth.rate, growth.context) == (0.1, 16384)
    positions = torch.tensor([[0, 16383, 16384, 40000, 262143]])
    wanted = get_llama_4_attn_scale(positions, 0.1, 16384).flatten()
    np.testing.assert_allclose(growth.factors(262144)[positions[0]], wanted.numpy(), rtol=1e-6)
    assert within_context(spec, 16385) == spec
    short = within_context(spec, 16384).uniform_attention
    assert short == replace(spec.uniform_attention, growth=None) and not short.has_steps_before_attention


PUBLISHED = {"glm4": GLM4_9B, "glm": GLM_9B, "phi-4-mini": PHI4_MINI, "ernie": ERNIE, "hunyuan": HUNYUAN}
"""Configs as their authors publish them, with fields that transformers does not know."""


@pytest.mark.parametrize(
    ("name", "rotary_dim", "interleaved"),
    [("glm4", 64, True), ("glm", 64, True), ("phi-4-mini", 96, False), ("ernie", 128, True), ("hunyuan", 128, False)],
)
def test_published_configs_of_models_with_rotations_of_their_own(name: str, rotary_dim: int, interleaved: bool) -> None:
    config = PUBLISHED[name]
    spec = from_hf(config)
    attention = spec.uniform_attention
    assert (attention.head_dim, attention.rotated_dim, attention.interleaved) == (128, rotary_dim, interleaved)
    assert (spec.max_context, spec.windows) == (config["max_position_embeddings"], (None,) * spec.num_layers)
    (kind,) = [each for each in transformers.MODEL_FOR_CAUSAL_LM_MAPPING if each.model_type == config["model_type"]]
    known = kind(**copy.deepcopy({field: value for field, value in config.items() if field != "auto_map"}))
    again = from_hf(saved(known, spec.architecture))
    assert again == replace(spec, checkpoint_dtype=again.checkpoint_dtype)
    frequencies = spec.ropes[0].inverse_frequencies(rotary_dim, 4096)
    module = importlib.import_module(kind.__module__.replace("configuration", "modeling"))
    rotary = next(value for field, value in vars(module).items() if field.endswith("RotaryEmbedding"))(known)
    np.testing.assert_allclose(frequencies, rotary.inv_freq.numpy(), rtol=2e-6, atol=0)
    assert spec.ropes[0].magnitude == pytest.approx(rotary.attention_scaling, rel=1e-9)


@pytest.mark.parametrize(
    ("config", "change", "field"),
    [
        (GLM4_9B, {"partial_rotary_factor": 0.01}, "partial_rotary_factor"),
        (GLM4_9B, {"partial_rotary_factor": 0.34}, "partial_rotary_factor"),
        (GLM4_9B, {"partial_rotary_factor": 1.5}, "partial_rotary_factor"),
        (GLM4_9B, {"rope_scaling": {"rope_type": "default", "partial_rotary_factor": "half"}}, "partial_rotary_factor"),
        (PHI4_MINI, {"partial_rotary_factor": 1.0}, "short_factor"),
        (ERNIE, {"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        (HUNYUAN, {"use_qk_norm": False}, "use_qk_norm"),
        (HUNYUAN, {"use_cla": True}, "use_cla"),
        (HUNYUAN, {"num_experts": 8}, "num_experts"),
        (HUNYUAN, {"rope_scaling": {"type": "dynamic", "alpha": "x"}}, "alpha"),
        (HUNYUAN, {"rope_scaling": {"type": "dynamic", "factor": 0.5}}, "factor"),
    ],
)
def test_what_such_models_may_not_say(config: dict[str, Any], change: dict[str, Any], field: str) -> None:
    with pytest.raises(ModelRejected) as caught:
        from_hf(config | change)
    assert caught.value.field == field and "config.json" in str(caught.value)


def test_the_oldest_spelling_of_linear_scaling() -> None:
    assert from_hf(llama(rope_scaling={"type": "linear", "factor": 4})).ropes == (Rope(5e5, Linear(4.0)),)


@pytest.mark.parametrize("architecture", ["Qwen2ForCausalLM", "Qwen3ForCausalLM"])
@pytest.mark.parametrize("has_layer_types", [False, True])
def test_qwen_windows_start_at_a_layer(architecture: str, has_layer_types: bool) -> None:
    options: dict[str, Any] = {"use_sliding_window": True, "sliding_window": 32, "max_window_layers": 1}
    config = FAMILIES[architecture](**SIZES, **options)
    data = saved(config, architecture)
    if not has_layer_types:
        del data["layer_types"]
    windows = from_hf(data).windows
    assert windows == (None, 32, 32, 32)
    assert [window is not None for window in windows] == [kind == "sliding_attention" for kind in config.layer_types]


def test_mistral_windows_every_layer_and_defaults_as_transformers_does() -> None:
    data = saved(transformers.MistralConfig(**SIZES, sliding_window=100), "MistralForCausalLM")
    assert from_hf(data).windows == (100,) * 4
    assert from_hf({**data, "sliding_window": None}).windows == (None,) * 4
    del data["sliding_window"]
    assert from_hf({**data, "max_position_embeddings": 8192}).windows == (4096,) * 4
    assert from_hf(data).windows == (None,) * 4, "a window longer than the context limits nothing"


@pytest.mark.parametrize("field", ["dtype", "torch_dtype"])
def test_both_spellings_of_the_dtype(field: str) -> None:
    assert from_hf(llama(**{field: "bfloat16"})).checkpoint_dtype == "bfloat16"
    assert from_hf(llama()).checkpoint_dtype is None


def test_a_config_without_architectures_goes_by_its_model_type() -> None:
    assert from_hf({**SIZES, "model_type": "qwen3"}).uniform_attention.qk_norm


REFUSED = [
    ({"architectures": ["BloomForCausalLM"]}, "architectures"),
    ({"architectures": ["LlamaForCausalLM", "LlamaForCausalLM"]}, "architectures"),
    ({"architectures": None, "model_type": "mamba"}, "model_type"),
    ({"model_type": "mistral"}, "model_type"),
    ({"auto_map": {"AutoModelForCausalLM": "modeling.Mine"}}, "auto_map"),
    ({"rope_scaling": {"rope_type": "yarn", "factor": 0.5}}, "factor"),
    ({"rope_scaling": {**YARN, "beta_slow": 40}}, "beta_slow"),
    ({"rope_scaling": {**YARN, "truncate": 1}}, "truncate"),
    ({"rope_theta": 1.0, "rope_scaling": YARN}, "rope_theta"),
    ({"rope_scaling": {**LONG_ROPE, "short_factor": [1.0] * 8}}, "long_factor"),
    ({"rope_scaling": {**LONG_ROPE, "short_factor": [1.0] * 7, "long_factor": [1.0] * 8}}, "short_factor"),
    ({"rope_scaling": {**LONG_ROPE, "short_factor": [0.0] * 8, "long_factor": [1.0] * 8}}, "short_factor"),
    ({"rope_scaling": {"rope_type": "axial"}}, "rope_type"),
    ({"rope_scaling": {"type": "dynamic"}}, "factor"),
    ({"rope_scaling": {"type": "other", "factor": 4.0}}, "rope_type"),
    ({"rope_scaling": {"full_attention": {"rope_type": "default"}, "rope_type": ["x"]}}, "rope_type"),
    ({"rope_scaling": {**LLAMA3, "high_freq_factor": 1.0}}, "high_freq_factor"),
    ({"rope_scaling": {**LLAMA3, "factor": None}}, "factor"),
    ({"rope_scaling": "llama3"}, "rope_scaling"),
    ({"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5}}, "partial_rotary_factor"),
    ({"rope_parameters": {"full_attention": {"rope_type": "linear", "factor": 4.0}}}, "full_attention"),
    ({"rope_theta": 0}, "rope_theta"),
    ({"hidden_act": "gelu"}, "hidden_act"),
    ({"quantization_config": "fp8"}, "quantization_config"),
    ({"attn_logit_softcapping": 50.0}, "attn_logit_softcapping"),
    ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
    ({"num_local_experts": 8}, "num_local_experts"),
    ({"layer_types": ["sliding_attention"] * 4}, "layer_types"),
    ({"layer_types": ["full_attention"]}, "layer_types"),
    ({"dtype": "float8_e4m3fn"}, "torch_dtype"),
    ({"num_key_value_heads": 3}, "num_key_value_heads"),
    ({"num_attention_heads": 6, "num_key_value_heads": 2}, "hidden_size"),
    ({"head_dim": 15}, "head_dim"),
    ({"hidden_size": -64}, "hidden_size"),
    ({"hidden_size": 1 << 40}, "hidden_size"),
    ({"hidden_size": 64.0}, "hidden_size"),
    ({"num_hidden_layers": True}, "num_hidden_layers"),
    ({"vocab_size": None}, "vocab_size"),
    ({"rms_norm_eps": float("nan")}, "rms_norm_eps"),
    ({"tie_word_embeddings": "yes"}, "tie_word_embeddings"),
]


@pytest.mark.parametrize(("change", "field"), REFUSED)
def test_what_cannot_be_computed_is_refused_by_name(change: dict[str, object], field: str) -> None:
    with pytest.raises(ModelRejected) as caught:
        from_hf(llama(**change))
    assert caught.value.field in (field, "dtype" if field == "torch_dtype" else field)
    assert caught.value.limit is not None
    assert "config.json" in str(caught.value) and str(caught.value.field) in str(caught.value)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=5,
)


@settings(max_examples=300, deadline=None)
@given(st.sampled_from(sorted(EVERY)), st.data())
def test_any_values_give_a_spec_or_a_refusal(architecture: str, data: st.DataObject) -> None:
    config = {**saved(EVERY[architecture](**SIZES, **TOKENS), architecture)}
    fields = st.sampled_from([*sorted(config), "rope_scaling", "torch_dtype", "auto_map"])
    config |= data.draw(st.dictionaries(fields, JSON | st.sampled_from([LLAMA3, 1, 2, 64]), min_size=1, max_size=3))
    try:
        spec = from_hf(config)
    except ModelRejected:
        return
    assert isinstance(spec, DecoderSpec)
    attention = spec.uniform_attention
    assert attention.heads % attention.kv_heads == 0 and len(spec.windows) == spec.num_layers
    assert np.isfinite(spec.ropes[attention.rope].inverse_frequencies(attention.rotated_dim, 64)).all()
    assert 2 <= attention.rotated_dim <= attention.head_dim and attention.rotated_dim % 2 == 0


def gguf_model(**changes: object) -> dict[str, object]:
    given = {
        "block_count": 2,
        "context_length": 512,
        "embedding_length": 64,
        "feed_forward_length": 112,
        "attention.head_count": 4,
        "attention.head_count_kv": 2,
        "attention.layer_norm_rms_epsilon": 1e-5,
        "rope.freq_base": 1e6,
        **{key.replace("__", "."): value for key, value in changes.items()},
    }
    return {"general.architecture": "llama", **{f"llama.{key}": value for key, value in given.items()}}


SHAPES = {"token_embd.weight": (96, 64)}
GGUF_YARN = {
    "rope__scaling__type": "yarn",
    "rope__scaling__factor": 4.0,
    "rope__scaling__original_context_length": 256,
}


def test_a_gguf_header_reads_as_the_same_model() -> None:
    spec = from_gguf(gguf_model(vocab_size=96, rope__scaling__type="linear", rope__scaling__factor=2.0), SHAPES)
    assert (spec.architecture, spec.num_layers, spec.vocab_size) == ("LlamaForCausalLM", 2, 96)
    assert spec.tied_head and not spec.has_biases and spec.ropes == (Rope(1e6, Linear(2.0)),)
    assert spec.uniform_attention.head_dim == 16
    shapes = {**SHAPES, "output.weight": (96, 64), "blk.0.attn_q.bias": (64,)}
    untied = from_gguf(gguf_model(attention__sliding_window=64), shapes)
    assert not untied.tied_head and untied.uniform_attention.qkv_bias and untied.windows == (64, 64)


def test_a_gguf_header_with_yarn_counts_what_it_adds_to_the_context() -> None:
    magnitude = 0.1 * math.log(4.0) + 1.0
    spec = from_gguf(gguf_model(**GGUF_YARN, rope__scaling__yarn_attn_factor=np.float32(magnitude).item()), SHAPES)
    assert spec.max_context == 1024 and spec.ropes == (Rope(1e6, Yarn(4.0, 256), magnitude),)
    windowed = from_gguf(gguf_model(**GGUF_YARN, attention__sliding_window=600), SHAPES)
    assert windowed.windows == (600, 600)
    assert from_gguf(gguf_model(attention__sliding_window=600), SHAPES).windows == (None, None)


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"expert_count": 8}, "llama.expert_used_count"),
        ({"expert_shared_count": 8}, "llama.expert_shared_count"),
        ({"attn_logit_softcapping": 50.0}, "llama.attn_logit_softcapping"),
        ({"rope__scaling__type": "su"}, "llama.rope.scaling.type"),
        ({"rope__scaling__type": "yarn"}, "llama.rope.scaling.factor"),
        ({"rope__scaling__type": "longrope"}, "rope_factors_long.weight"),
        ({**GGUF_YARN, "rope__scaling__original_context_length": None}, "llama.rope.scaling.original_context_length"),
        ({**GGUF_YARN, "rope__scaling__yarn_attn_factor": 1.5}, "llama.rope.scaling.yarn_attn_factor"),
        ({**GGUF_YARN, "rope__scaling__yarn_log_multiplier": 0.1}, "llama.rope.scaling.yarn_log_multiplier"),
        ({**GGUF_YARN, "rope__scaling__yarn_ext_factor": 0.0}, "llama.rope.scaling.yarn_ext_factor"),
        ({**GGUF_YARN, "rope__scaling__yarn_beta_slow": 64.0}, "llama.rope.scaling.yarn_beta_slow"),
        ({"rope__scaling__yarn_attn_factor": 1.5}, "llama.rope.scaling.yarn_attn_factor"),
        ({"rope__scaling__attn_factor": 0.0}, "llama.rope.scaling.attn_factor"),
        ({"attention__sliding_window_pattern": 2}, "llama.attention.sliding_window_pattern"),
        ({"embedding_scale": 2.0}, "llama.embedding_scale"),
        ({"rope__dimension_count": 8}, "llama.rope.dimension_count"),
        ({"attention__head_count": [4, 4]}, "llama.attention.head_count"),
        ({"attention__head_count_kv": 3}, "llama.attention.head_count_kv"),
        ({"vocab_size": 97}, "llama.vocab_size"),
        ({"block_count": None}, "llama.block_count"),
    ],
)
def test_what_a_gguf_header_may_not_say(change: dict[str, object], field: str) -> None:
    with pytest.raises(ModelRejected) as caught:
        from_gguf(gguf_model(**change), SHAPES, origin="x.gguf")
    assert caught.value.field == field and "x.gguf" in str(caught.value)


def test_unknown_gguf_architectures_are_refused() -> None:
    with pytest.raises(ModelRejected, match="general.architecture is 'mamba'"):
        from_gguf({**gguf_model(), "general.architecture": "mamba"}, SHAPES)


def test_reading_a_spec_needs_no_torch() -> None:
    code = "import sys, headrace.engine.model.families.registry\nsys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize(
    "older", ["yarn", {"type": "linear", "factor": 2.0}, {"rope_type": "linear", "beta_fast": 2.0}]
)
def test_a_rope_that_is_given_twice_must_be_one(older: object) -> None:
    """Whoever adds `rope_scaling` to a file that has `rope_parameters` must not get the old rope in silence."""
    given = {"rope_type": "linear", "factor": 4.0, "rope_theta": 500.0}
    plain = from_hf(llama(rope_parameters=given))
    assert from_hf(llama(rope_parameters=given, rope_scaling={"type": "linear", "factor": 4.0})) == plain
    with pytest.raises(ModelRejected) as caught:
        from_hf(llama(rope_parameters=given, rope_scaling=older))
    assert caught.value.field == "rope_scaling"
