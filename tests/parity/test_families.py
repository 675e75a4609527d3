"""A tiny checkpoint of every family gives the logits that transformers gives, however its tokens are cut into steps."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import anyio
import pytest
import torch
import transformers
from against_transformers import check_cuts, check_engine, drawn_with_logits
from layer_normed_models import LAYER_NORMED
from model_driver import OPERATIONS, ModelUnderTest, capacity
from planted_bugs import (
    Bug,
    attention,
    exchanged,
    feed,
    halves_exchanged,
    is_caught,
    misread,
    names,
    norms_before_rotation,
    norms_behind_rotation,
    plain_ropes,
    pre_norms,
    ropes,
    stored,
    vectors,
    whole,
    without,
    zeroed,
)
from torch import Tensor

from headrace.engine import Engine, InvalidParams, SamplingParams
from headrace.engine.model.checkpoint.weights import load_weights
from headrace.engine.model.cpu.sizing import runs_native
from headrace.engine.model.families.registry import from_hf, read_hf_config
from headrace.engine.model.rope import UNROTATED, Rope, Yarn
from headrace.engine.model.spec import Attention
from headrace.ops.cpu.block import CpuOps
from headrace.ops.stream import HeadNorms

SIZES: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 112,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
WINDOW = 13  # shorter than every prompt, and no multiple of a page


def llama(**changes: Any) -> Any:
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**(SIZES | changes)))


def mistral(**changes: Any) -> Any:
    return transformers.MistralForCausalLM(transformers.MistralConfig(**(SIZES | changes)))


def qwen2(**changes: Any) -> Any:
    return transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**(SIZES | changes)))


def qwen3(**changes: Any) -> Any:
    return transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**(SIZES | {"head_dim": 24} | changes)))


def ministral(**changes: Any) -> Any:
    return transformers.MinistralForCausalLM(transformers.MinistralConfig(**(SIZES | {"head_dim": 24} | changes)))


def ministral3(**changes: Any) -> Any:
    return transformers.Ministral3ForCausalLM(transformers.Ministral3Config(**(SIZES | {"head_dim": 24} | changes)))


def phi3(**changes: Any) -> Any:
    return transformers.Phi3ForCausalLM(transformers.Phi3Config(**(SIZES | changes)))


def granite(**changes: Any) -> Any:
    return transformers.GraniteForCausalLM(transformers.GraniteConfig(**(SIZES | changes)))


def granite4(**changes: Any) -> Any:
    sizes = {"num_local_experts": 0, "shared_intermediate_size": 48, "layer_types": ["attention"] * 3}
    return transformers.GraniteMoeHybridForCausalLM(transformers.GraniteMoeHybridConfig(**(SIZES | sizes | changes)))


def smollm3(**changes: Any) -> Any:
    return transformers.SmolLM3ForCausalLM(transformers.SmolLM3Config(**(SIZES | changes)))


def seed_oss(**changes: Any) -> Any:
    return transformers.SeedOssForCausalLM(transformers.SeedOssConfig(**(SIZES | {"head_dim": 24} | changes)))


def olmo2(**changes: Any) -> Any:
    return transformers.Olmo2ForCausalLM(transformers.Olmo2Config(**(SIZES | changes)))


def olmo3(**changes: Any) -> Any:
    return transformers.Olmo3ForCausalLM(transformers.Olmo3Config(**(SIZES | changes)))


def exaone4(**changes: Any) -> Any:
    return transformers.Exaone4ForCausalLM(transformers.Exaone4Config(**(SIZES | changes)))


def gemma3(**changes: Any) -> Any:
    return transformers.Gemma3ForCausalLM(transformers.Gemma3TextConfig(**(SIZES | {"head_dim": 24} | changes)))


def gemma2(**changes: Any) -> Any:
    config = transformers.Gemma2Config(**(SIZES | {"head_dim": 24} | changes), attn_implementation="eager")
    return transformers.Gemma2ForCausalLM(config)


def glm(**changes: Any) -> Any:
    return transformers.GlmForCausalLM(
        transformers.GlmConfig(**(SIZES | {"head_dim": 24, "eos_token_id": []} | changes))
    )


def glm4(**changes: Any) -> Any:
    config = transformers.Glm4Config(**(SIZES | {"head_dim": 24, "eos_token_id": []} | changes))
    return transformers.Glm4ForCausalLM(config)


def ernie(**changes: Any) -> Any:
    return transformers.Ernie4_5ForCausalLM(transformers.Ernie4_5Config(**(SIZES | {"head_dim": 24} | changes)))


def helium(**changes: Any) -> Any:
    return transformers.HeliumForCausalLM(transformers.HeliumConfig(**(SIZES | {"head_dim": 16} | changes)))


def gemma(**changes: Any) -> Any:
    return transformers.GemmaForCausalLM(transformers.GemmaConfig(**(SIZES | {"head_dim": 24} | changes)))


def cwm(**changes: Any) -> Any:
    tokens = {"bos_token_id": 95, "eos_token_id": []}
    return transformers.CwmForCausalLM(transformers.CwmConfig(**(SIZES | tokens | {"head_dim": 24} | changes)))


def hunyuan(**changes: Any) -> Any:
    config = transformers.HunYuanDenseV1Config(**(SIZES | {"head_dim": 24} | changes))
    return transformers.HunYuanDenseV1ForCausalLM(config)


YARN = {"rope_type": "yarn", "rope_theta": 500.0, "factor": 4.0, "original_max_position_embeddings": 32}
GROWING = {
    **YARN,
    "original_max_position_embeddings": 8,  # so that queries grow several times
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.4,
}
LONG_ROPE = {
    "rope_type": "longrope",
    "rope_theta": 500.0,
    "factor": 8.0,
    "original_max_position_embeddings": 16,  # which every sequence below exceeds
    "short_factor": [1.0] * 8,
    "long_factor": [1.0 + 0.5 * pair for pair in range(8)],
}
PART_OF_LONG_ROPE = {
    **LONG_ROPE,
    "partial_rotary_factor": 0.75,
    "short_factor": [1.0] * 6,
    "long_factor": [1.0 + 0.5 * pair for pair in range(6)],
}
ALPHA = {"rope_type": "dynamic", "alpha": 50.0, "rope_theta": 500.0, "factor": 1.0}
FACTORS = {
    "embedding_multiplier": 6.0, "residual_multiplier": 0.4, "attention_multiplier": 0.15, "logits_scaling": 3.0,
}  # fmt: skip
EVERY_OTHER = ["full_attention", "sliding_attention", "full_attention"]
LATE = {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 1}
FAMILIES: dict[str, Callable[[], Any]] = {
    "llama 2, one key head a query head": lambda: llama(num_key_value_heads=4, tie_word_embeddings=False),
    "llama 3, scaled rope": lambda: llama(rope_parameters=LLAMA3, tie_word_embeddings=False),
    "llama with linear rope": lambda: llama(
        rope_parameters={"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}
    ),
    "llama with dynamic rope": lambda: llama(
        rope_parameters={"rope_type": "dynamic", "rope_theta": 500.0, "factor": 4.0}, max_position_embeddings=96
    ),
    "llama with every bias": lambda: llama(attention_bias=True, mlp_bias=True, tie_word_embeddings=False),
    "smollm2, tied": lambda: llama(
        tie_word_embeddings=True, hidden_size=48, num_attention_heads=3, num_key_value_heads=1
    ),
    "mistral, window": lambda: mistral(sliding_window=WINDOW),
    "mistral, no window": lambda: mistral(sliding_window=None, head_dim=32, tie_word_embeddings=True),
    "qwen2, tied": lambda: qwen2(tie_word_embeddings=True, rope_parameters={"rope_type": "default", "rope_theta": 1e6}),
    "qwen2, later layers windowed": lambda: qwen2(**LATE),
    "llama with yarn": lambda: llama(rope_parameters=YARN),
    "mistral with yarn, no window": lambda: mistral(sliding_window=None, rope_parameters={**YARN, "truncate": False}),
    "ministral, window in the middle layer": lambda: ministral(sliding_window=WINDOW, layer_types=EVERY_OTHER),
    "ministral 3": lambda: ministral3(rope_parameters=dict(GROWING)),
    "ministral 3, window, tied": lambda: ministral3(
        sliding_window=WINDOW, tie_word_embeddings=True, rope_parameters={**GROWING, "mscale": 2.0}
    ),
    "phi-3, window": lambda: phi3(sliding_window=WINDOW),
    "phi-3, longrope": lambda: phi3(
        rope_parameters=dict(LONG_ROPE), original_max_position_embeddings=16, tie_word_embeddings=True
    ),
    "phi-4-mini, three quarters of each head, longrope": lambda: phi3(
        rope_parameters=dict(PART_OF_LONG_ROPE), original_max_position_embeddings=16, tie_word_embeddings=True
    ),
    "phi-4-mini, half of each head, window": lambda: phi3(partial_rotary_factor=0.5, sliding_window=WINDOW),
    "granite": lambda: granite(**FACTORS, tie_word_embeddings=True),
    "granite 4, tied": lambda: granite4(**FACTORS, position_embedding_type="rope", tie_word_embeddings=True),
    "granite 4, not rotated, biased": lambda: granite4(
        **FACTORS, position_embedding_type="nope", attention_bias=True, tie_word_embeddings=False
    ),
    "granite with every bias": lambda: granite(**FACTORS, attention_bias=True, mlp_bias=True),
    "smollm3": lambda: smollm3(no_rope_layer_interval=2, tie_word_embeddings=True),
    "smollm3, window in the middle layer": lambda: smollm3(
        no_rope_layers=[1, 0, 1], use_sliding_window=True, sliding_window=WINDOW
    ),
    "seed-oss": lambda: seed_oss(),
    "seed-oss with every bias": lambda: seed_oss(attention_out_bias=True, mlp_bias=True),
    "olmo2": lambda: olmo2(),
    "olmo2 with every bias": lambda: olmo2(attention_bias=True, tie_word_embeddings=True),
    "olmo3, window in the middle layer": lambda: olmo3(
        sliding_window=WINDOW, layer_types=EVERY_OTHER, rope_parameters={"full_attention": dict(YARN)}
    ),
    "exaone4, no window": lambda: exaone4(sliding_window=None, layer_types=["full_attention"] * 3),
    "exaone4, window in the middle layer": lambda: exaone4(sliding_window=WINDOW, layer_types=EVERY_OTHER),
    "gemma2, window in the middle layer": lambda: gemma2(
        sliding_window=WINDOW,
        layer_types=EVERY_OTHER,
        query_pre_attn_scalar=10,
        attn_logit_softcapping=2.0,
        final_logit_softcapping=3.0,
    ),
    "gemma2 without bounds, no window": lambda: gemma2(
        sliding_window=200, attn_logit_softcapping=None, final_logit_softcapping=None, tie_word_embeddings=False
    ),
    "gemma3, window in the middle layer": lambda: gemma3(
        sliding_window=WINDOW,
        layer_types=EVERY_OTHER,
        query_pre_attn_scalar=40,
        rope_parameters={
            "full_attention": {"rope_type": "linear", "rope_theta": 5000.0, "factor": 8.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 300.0},
        },
    ),
    "gemma3 with every bias, no window": lambda: gemma3(
        sliding_window=200, attention_bias=True, tie_word_embeddings=False
    ),
    "qwen3": lambda: qwen3(tie_word_embeddings=False),
    "qwen3, tied, biased, later layers windowed": lambda: qwen3(tie_word_embeddings=True, attention_bias=True, **LATE),
    **LAYER_NORMED,
}
FAMILIES |= {
    "glm": lambda: glm(),
    "glm, a quarter of each head, no bias, tied": lambda: glm(
        partial_rotary_factor=0.25, attention_bias=False, tie_word_embeddings=True
    ),
    "glm with yarn": lambda: glm(rope_parameters={**YARN, "partial_rotary_factor": 0.5}),
    "glm4": lambda: glm4(),
    "glm4, all of each head": lambda: glm4(partial_rotary_factor=1.0, num_key_value_heads=4),
    "ernie 4.5": lambda: ernie(),
    "ernie 4.5 with every bias": lambda: ernie(use_bias=True, tie_word_embeddings=False),
    "hunyuan": lambda: hunyuan(rope_parameters={"rope_type": "default", "rope_theta": 1e4}),
    "hunyuan, stretched, biased, tied": lambda: hunyuan(
        rope_parameters=dict(ALPHA), attention_bias=True, tie_word_embeddings=True
    ),
    "gemma": lambda: gemma(),
    "gemma with every bias": lambda: gemma(attention_bias=True, tie_word_embeddings=False),
    "cwm, window in the middle layer": lambda: cwm(
        sliding_window=WINDOW, layer_types=EVERY_OTHER, rope_parameters=dict(LLAMA3), mlp_bias=True
    ),
    "helium": lambda: helium(),
    "helium with every bias": lambda: helium(attention_bias=True, mlp_bias=True),
}
LENGTHS = (64, 40, 17)
"""Of the sequences that run side by side; past the window, the original context and several pages."""


@cache
def reference(family: str) -> tuple[Any, list[list[int]], list[Tensor]]:
    """A model whose every parameter matters, sequences, and their logits in one piece by transformers."""
    torch.manual_seed(11)
    model = FAMILIES[family]().eval()
    for name, parameter in model.named_parameters():
        is_norm = ("norm" in name or "ln_" in name) and "bias" not in name
        mean, spread = (1.0, 0.2) if is_norm else (0.0, 0.3 if "bias" in name else 0.12)
        torch.nn.init.normal_(parameter, mean, spread)
    return model, *drawn_with_logits(model, LENGTHS)


@pytest.fixture(params=FAMILIES)
def family(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.mark.parametrize("native", OPERATIONS)
def test_logits_equal_those_of_transformers_for_any_cut(family: str, native: bool, tmp_path: Path) -> None:
    model, sequences, expected = reference(family)
    model.save_pretrained(tmp_path)
    spec, tested = ModelUnderTest.load(tmp_path, native=native)
    if native and not runs_native(spec):
        pytest.skip("a variant of attention, which torch's operations compute")
    windowed = "window" in family and "no window" not in family
    first, last = (1, 1) if "middle" in family else (1, 2) if "later" in family else (0, 2)
    windows = tuple(WINDOW if windowed and first <= layer <= last else None for layer in range(3))
    assert spec.windows == windows, "what is tested is what was meant"
    check_cuts(tested, sequences, expected)


@pytest.mark.parametrize("family", ["qwen3, tied, biased, later layers windowed", "olmo2 with every bias"])
def test_biases_and_norms_change_places_with_the_rows_of_heads(family: str, tmp_path: Path) -> None:
    """A checkpoint whose pairs were put side by side, with all that belongs to them, is the same model."""
    model, sequences, expected = reference(family)
    head_dim = getattr(model.config, "head_dim", None) or 16
    state = {name: each.clone() for name, each in model.state_dict().items()}
    moved = [name for name in state if any(part in name for part in ("q_proj", "k_proj", "q_norm", "k_norm"))]
    for name in moved:
        state[name] = state[name].unflatten(0, (-1, 2, head_dim // 2)).transpose(1, 2).flatten(0, 2)
    assert len({name.split(".", 4)[-1] for name in moved}) == 6
    model.save_pretrained(tmp_path, state_dict=state)
    spec = from_hf(read_hf_config(tmp_path))
    layers = []
    for layer in spec.layers:
        assert isinstance(layer.mixer, Attention)
        layers.append(replace(layer, mixer=replace(layer.mixer, interleaved=True)))
    spec = replace(spec, layers=tuple(layers))
    weights = load_weights(tmp_path, spec, dtype=torch.float32, device="cpu")
    tested = ModelUnderTest.make(spec, weights, torch.float32, capacity(spec.vocab_size))
    for wanted, found in zip(expected, tested.logits(sequences, 128), strict=True):
        torch.testing.assert_close(found, wanted, rtol=0, atol=1e-4)


HEADS, KV_HEADS = 4, 2
MIDDLE = "window in the middle layer"
FUSED = ["phi-3, window", "glm", "glm4"]
STRETCHED = [
    "llama 3, scaled rope", "llama with linear rope", "llama with yarn",
    "mistral with yarn, no window", "ministral 3", "phi-3, longrope", "glm with yarn",
    "phi-4-mini, three quarters of each head, longrope", f"olmo3, {MIDDLE}", f"gemma3, {MIDDLE}", f"cwm, {MIDDLE}",
]  # fmt: skip
MAGNIFIED = [
    "llama with yarn", "mistral with yarn, no window", "ministral 3, window, tied", "phi-3, longrope", "glm with yarn",
    "phi-4-mini, three quarters of each head, longrope", f"olmo3, {MIDDLE}",
]  # fmt: skip
WINDOWED = [
    "mistral, window", "qwen2, later layers windowed", "phi-3, window", f"ministral, {MIDDLE}", f"smollm3, {MIDDLE}",
    f"olmo3, {MIDDLE}", f"exaone4, {MIDDLE}", f"gemma2, {MIDDLE}", f"gemma3, {MIDDLE}", f"cwm, {MIDDLE}",
    "ministral 3, window, tied",
]  # fmt: skip
GRANITES = ["granite", "granite 4, tied"]
GEMMAS = ["gemma", f"gemma2, {MIDDLE}", f"gemma3, {MIDDLE}"]
SANDWICHED = [*GEMMAS[1:], "glm4"]
NORMED_BEHIND = ["olmo2", f"olmo3, {MIDDLE}", "exaone4, no window"]
NORMED_HEADS = ["qwen3", "exaone4, no window", f"gemma3, {MIDDLE}"]
PAIRED = ["glm", "glm4", "ernie 4.5", "helium"]


def heads_as_one(found: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The norms of single heads as one over all of them."""
    counts = {"q_norm_D": HEADS, "k_norm_D": KV_HEADS}
    return {
        name.replace("norm_D", "norm_X"): vector.repeat(counts[name]) if name in counts else vector
        for name, vector in found.items()
    }


all_as_one = attention(qk_norm=False, qk_norm_across_heads=True)


def values_before_keys(joined: Tensor) -> Tensor:
    """Queries, then values, then keys."""
    return torch.cat((joined[: len(joined) // 2], halves_exchanged(joined[len(joined) // 2 :])))


WRONG: list[tuple[str, str, Bug]] = [
    *((family, "a rope that is not stretched", misread(plain_ropes)) for family in STRETCHED),
    *((family, "no magnitude", misread(ropes(magnitude=1.0))) for family in MAGNIFIED),
    ("mistral with yarn, no window", "a ramp from pair to pair", misread(ropes(scaling=Yarn(4.0, 32)))),
    ("hunyuan, stretched, biased, tied", "no alpha", misread(ropes(theta=500.0))),
    (f"gemma3, {MIDDLE}", "one rope for all layers", misread(attention(rope=0))),
    (f"olmo3, {MIDDLE}", "one rope for all layers", misread(attention(rope=0))),
    ("smollm3", "every layer rotated", misread(attention(rope=0))),
    (f"exaone4, {MIDDLE}", "every layer rotated", misread(attention(rope=0))),
    ("ministral 3", "queries that do not grow", misread(attention(growth=None))),
    *((family, "no window", misread(attention(window=None))) for family in WINDOWED),
    ("mistral, window", "a window that is longer by one", misread(attention(window=WINDOW + 1))),
    *((family, "all of each head rotated", misread(attention(rotary_dim=None))) for family in ("glm", "glm4")),
    ("phi-4-mini, half of each head, window", "all of each head rotated", misread(attention(rotary_dim=None))),
    *((family, "pairs half a head apart", misread(attention(interleaved=False))) for family in PAIRED),
    *((family, "norms without their 1", misread(names(norm_offset=0.0))) for family in GEMMAS),
    *((family, "embeddings not scaled", misread(whole(embedding_scale=1.0))) for family in GEMMAS),
    *((family, "SiLU", misread(feed(activation="silu"))) for family in GEMMAS),
    *((family, "scores over the root of the size of a head", misread(attention(scale=None))) for family in GEMMAS[1:]),
    (GEMMAS[1], "another bound of scores", misread(attention(cap=50.0))),
    (GEMMAS[1], "no bound of logits", misread(whole(logits_cap=None))),
    *((family, "embeddings not scaled", misread(whole(embedding_scale=1.0))) for family in GRANITES),
    *((family, "results not scaled", misread(whole(embedding_scale=6.0))) for family in GRANITES),
    *((family, "logits not scaled", misread(whole(logits_scale=1.0))) for family in GRANITES),
    *((family, "scores over the root of the size of a head", misread(attention(scale=None))) for family in GRANITES),
    ("granite 4, tied", "heads not rotated", misread(whole(ropes=(UNROTATED,)))),
    ("granite 4, not rotated, biased", "heads rotated", misread(whole(ropes=(Rope(1e4),)))),
    ("granite 4, tied", "ups for gates", stored("input_linear.weight", halves_exchanged)),
    *((family, "no norms behind", without("result_norm_E")) for family in SANDWICHED),
    *((family, "no norms before", without("norm_E")) for family in SANDWICHED),
    *((family, "Llama's places", misread(exchanged("mixer_result_norm", "feed_norm"))) for family in SANDWICHED),
    *((family, "no norms", without("result_norm_E")) for family in NORMED_BEHIND),
    *((family, "norms before", misread(pre_norms)) for family in NORMED_BEHIND),
    *((family, "heads not normed", without("q_norm_D", "k_norm_D")) for family in (*NORMED_HEADS, "hunyuan")),
    *((family, "each other's norms", misread(exchanged("q_norm", "k_norm"))) for family in NORMED_HEADS),
    *((family, "heads normed behind rotation", misread(norms_behind_rotation)) for family in NORMED_HEADS),
    ("hunyuan", "heads normed before rotation", misread(norms_before_rotation)),
    *((family, "all heads normed as one", vectors(heads_as_one, all_as_one)) for family in NORMED_HEADS),
    *((family, "heads not normed", without("q_norm_X", "k_norm_X")) for family in NORMED_BEHIND[:2]),
    *((family, "ups for gates", stored("gate_up_proj.weight", halves_exchanged)) for family in FUSED),
    ("phi-3, window", "keys for values", stored("qkv_proj.weight", values_before_keys)),
    ("phi-3, window", "values first", stored("qkv_proj.weight", halves_exchanged)),
]


@pytest.mark.parametrize(("family", "bug", "planted"), WRONG)
def test_a_planted_bug_changes_logits(family: str, bug: str, planted: Bug, tmp_path: Path) -> None:
    """Were a rule without effect on these checkpoints, the tests above would not notice that it is broken."""
    model, sequences, expected = reference(family)
    model.save_pretrained(tmp_path)
    assert is_caught(planted, tmp_path, sequences[0], expected[0]), bug


BIASED = {
    "llama with every bias": ("qkv_bias", "o_bias", "gate_up_bias", "down_bias"),
    "qwen2, tied": ("qkv_bias",),
    "qwen3, tied, biased, later layers windowed": ("qkv_bias", "o_bias"),
    "granite with every bias": ("qkv_bias", "o_bias", "gate_up_bias", "down_bias"),
    "granite 4, not rotated, biased": ("qkv_bias", "o_bias"),
    "seed-oss with every bias": ("qkv_bias", "o_bias", "gate_up_bias", "down_bias"),
    "olmo2 with every bias": ("qkv_bias", "o_bias"),
    "gemma3 with every bias, no window": ("qkv_bias", "o_bias"),
    "glm": ("qkv_bias",),
    "ernie 4.5 with every bias": ("qkv_bias", "o_bias", "gate_up_bias", "down_bias"),
    "hunyuan, stretched, biased, tied": ("qkv_bias", "o_bias"),
    "gemma with every bias": ("qkv_bias", "o_bias"),
    f"cwm, {MIDDLE}": ("gate_up_bias", "down_bias"),
    "helium with every bias": ("qkv_bias", "gate_up_bias", "down_bias"),
}


@pytest.mark.parametrize(("family", "name"), [(family, name) for family, names in BIASED.items() for name in names])
def test_a_bias_left_out_changes_logits(family: str, name: str, tmp_path: Path) -> None:
    model, sequences, expected = reference(family)
    model.save_pretrained(tmp_path)
    assert is_caught(zeroed(name), tmp_path, sequences[0], expected[0])


@pytest.mark.parametrize("family", NORMED_BEHIND[:2])
def test_a_norm_over_all_heads_is_not_one_of_each(family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def of_each(ops: CpuOps, qkv_NX: Tensor, norms: HeadNorms) -> Tensor:
        heads_NHD = qkv_NX.unflatten(1, (-1, ops.head_dim))
        normed_NX = torch.nn.functional.rms_norm(heads_NHD, (ops.head_dim,), eps=1e-5).flatten(1)
        values = ops.kv_heads * ops.head_dim
        return torch.cat((normed_NX[:, :-values] * torch.cat((norms.q_D, norms.k_D)), qkv_NX[:, -values:]), 1)

    model, sequences, expected = reference(family)
    model.save_pretrained(tmp_path)
    monkeypatch.setattr(CpuOps, "norm_across_heads", of_each)
    assert is_caught(misread(), tmp_path, sequences[0], expected[0])


def test_an_engine_generates_and_embeds_what_transformers_does(family: str, tmp_path: Path) -> None:
    model, sequences, _ = reference(family)
    model.save_pretrained(tmp_path)
    check_engine(tmp_path, model, sequences[0])


def test_random_weights_need_a_config_alone(tmp_path: Path) -> None:
    qwen3().config.save_pretrained(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["config.json"]

    async def run(seed: int) -> list[int]:
        async with Engine(tmp_path, load_format="random", dtype="float32", kv_memory="1MiB", seed=seed) as engine:
            completion = await engine.generate([1, 2, 3], SamplingParams(temperature=0, max_tokens=9))
            for prompt in ("text", [{"role": "user", "content": "text"}]):
                with pytest.raises(InvalidParams, match="token ids") as caught:
                    await engine.generate(prompt)
                assert caught.value.field == "prompt"
            assert completion.choices[0].text == "" and completion.choices[0].finish_reason == "length"
            return completion.choices[0].token_ids

    first = anyio.run(run, 0)
    assert len(first) == 9 and anyio.run(run, 0) == first and anyio.run(run, 1) != first
