"""Tiny checkpoints of every family with experts give the logits and tokens that transformers gives."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from against_transformers import check_cuts, check_engine, difference, drawn_with_logits
from model_driver import OPERATIONS, ModelUnderTest
from planted_bugs import (
    Bug,
    attention,
    change_tensors,
    exchanged,
    is_caught,
    misread,
    plain_ropes,
    ropes,
    whole,
    without,
    zeroed,
)
from quantised_layouts import mxfp4
from safetensors.torch import load_file, save_file
from torch import Tensor

from headrace.engine import ModelRejected
from headrace.engine.model.checkpoint.weights import load_weights
from headrace.engine.model.cpu.sizing import runs_native
from headrace.engine.model.experts import ExpertsFeed
from headrace.engine.model.families.registry import from_hf, read_hf_config
from headrace.engine.model.rope import LongRope, Yarn
from headrace.engine.model.spec import DecoderSpec, DenseFeed
from headrace.ops.experts import Choice, route
from headrace.ops.routing import Routing

SIZES: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
TOP = {"num_experts_per_tok": 3}
SMALL = {"moe_intermediate_size": 32}
FACTORS = {
    "embedding_multiplier": 6.0, "residual_multiplier": 0.4, "attention_multiplier": 0.15, "logits_scaling": 3.0,
}  # fmt: skip
LONG_ROPE = {
    "rope_type": "longrope",
    "rope_theta": 500.0,
    "original_max_position_embeddings": 8,  # which every sequence exceeds
    "short_factor": [1.0 + 0.5 * pair for pair in range(8)],
    "long_factor": [1.0 + 0.5 * pair for pair in range(8)],  # the same: transformers' module takes the short ones
    "short_mscale": 1.2,
    "long_mscale": 1.4,
}
WINDOW = 13
Made = Callable[[], Any]


def made(name: str, **changes: Any) -> Made:
    config, model = (getattr(transformers, f"{name}{end}") for end in ("Config", "ForCausalLM"))
    return lambda: model(config(**(SIZES | changes)))


FAMILIES: dict[str, Made] = {
    "qwen3, renormalised, biased, a dense layer": made(
        "Qwen3Moe", **TOP, **SMALL, num_experts=8, norm_topk_prob=True, head_dim=24, attention_bias=True,
        mlp_only_layers=[1],
    ),
    "qwen3, windowed, every other layer": made(
        "Qwen3Moe", **TOP, **SMALL, num_experts=8, use_sliding_window=True, sliding_window=WINDOW, decoder_sparse_step=2
    ),
    "qwen2, shared and gated, a dense layer": made(
        "Qwen2Moe", **TOP, **SMALL, num_experts=8, shared_expert_intermediate_size=40, mlp_only_layers=[0]
    ),
    "qwen2, windowed, renormalised": made(
        "Qwen2Moe", **TOP, **SMALL, num_experts=8, shared_expert_intermediate_size=40, norm_topk_prob=True,
        use_sliding_window=True, sliding_window=WINDOW, max_window_layers=2,
    ),
    "mixtral, windowed": made("Mixtral", **TOP, num_local_experts=5, sliding_window=WINDOW),
    "phi": made("Phimoe", num_local_experts=5, router_jitter_noise=0.2),
    "phi, windowed, every bias, longrope": made(
        "Phimoe", num_local_experts=8, router_jitter_noise=0.6, attention_bias=True, lm_head_bias=True,
        sliding_window=WINDOW, head_dim=16, rope_parameters=dict(LONG_ROPE),
    ),
    "olmoe": made("Olmoe", **TOP, num_experts=8),
    "olmoe, renormalised, biased": made("Olmoe", **TOP, num_experts=8, norm_topk_prob=True, attention_bias=True),
    "granite": made("GraniteMoe", **TOP, **FACTORS, num_local_experts=8, attention_bias=True),
    "granite, shared": made("GraniteMoeShared", **TOP, **FACTORS, num_local_experts=8, shared_intermediate_size=40),
    "granite 4": made(
        "GraniteMoeHybrid", **TOP, **FACTORS, num_local_experts=8, shared_intermediate_size=40, attention_bias=True,
        layer_types=["attention"] * 3, position_embedding_type="rope",
    ),
    "granite, nothing shared": made("GraniteMoeShared", **TOP, num_local_experts=8, shared_intermediate_size=0),
    "ernie, corrected, shared, a dense layer": made("Ernie4_5_Moe", **SMALL, moe_k=3, moe_num_experts=8),
    "ernie, nothing shared, every other layer": made(
        "Ernie4_5_Moe", **SMALL, moe_k=2, moe_num_experts=8, moe_num_shared_experts=0, moe_layer_interval=2,
        moe_layer_start_index=0, moe_layer_end_index=2,
    ),
    "glm, groups, scaled, dense first layers": made(
        "Glm4Moe", **TOP, **SMALL, n_routed_experts=8, first_k_dense_replace=1, n_group=4, topk_group=2,
        routed_scaling_factor=1.8, use_qk_norm=True, attention_bias=True, n_shared_experts=2,
    ),
    "glm, not renormalised, no dense feed": made(
        "Glm4Moe", **TOP, **SMALL, n_routed_experts=8, first_k_dense_replace=0, norm_topk_prob=False
    ),
    "solar, groups, scaled, biased": made(
        "SolarOpen", **TOP, **SMALL, n_routed_experts=8, n_group=4, topk_group=2, routed_scaling_factor=1.8,
        attention_bias=True, n_shared_experts=2, head_dim=24,
    ),
    "solar, not renormalised, yarn": made(
        "SolarOpen", **TOP, **SMALL, n_routed_experts=8, norm_topk_prob=False, head_dim=16,
        rope_parameters={"rope_type": "yarn", "rope_theta": 500.0, "factor": 4.0,
                         "original_max_position_embeddings": 32},
    ),
    "gpt-oss, windowed": made(
        "GptOss", **TOP, num_local_experts=8, head_dim=16, sliding_window=WINDOW,
        rope_parameters={
            "rope_type": "yarn", "rope_theta": 500.0, "factor": 4.0, "original_max_position_embeddings": 32,
            "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False,
        },
    ),
}  # fmt: skip
LENGTHS = (64, 40, 17)


@cache
def reference(family: str) -> tuple[Any, list[list[int]], list[Tensor]]:
    """A model whose every parameter matters, sequences, and their logits in one piece by transformers."""
    torch.manual_seed(11)
    model = FAMILIES[family]().eval()
    for name, parameter in [*model.named_parameters(), *model.named_buffers()]:
        if "inv_freq" not in name:
            mean, spread = (1.0, 0.2) if "norm" in name else (0.0, 0.3 if "bias" in name else 0.12)
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
    kinds = {type(layer.feed) for layer in spec.layers}
    assert kinds == ({ExpertsFeed, DenseFeed} if "layer" in family else {ExpertsFeed}), "what is tested was meant"
    assert (set(spec.windows) != {None}) == ("windowed" in family)
    check_cuts(tested, sequences, expected)


def test_an_engine_generates_and_embeds_what_transformers_does(family: str, tmp_path: Path) -> None:
    model, sequences, _ = reference(family)
    model.save_pretrained(tmp_path)
    check_engine(tmp_path, model, sequences[0])


def rerouted(**changes: Any) -> Callable[[ExpertsFeed], ExpertsFeed]:
    return lambda feed: replace(feed, routing=replace(feed.routing, **changes))


def ungated(feed: ExpertsFeed) -> ExpertsFeed:
    assert feed.shared is not None and feed.shared.gated
    return replace(feed, shared=replace(feed.shared, gated=False))


BUGS: dict[str, tuple[str, Callable[[ExpertsFeed], ExpertsFeed]]] = {
    "not renormalised": ("qwen3, renormalised, biased, a dense layer", rerouted(renormalise=False)),
    "renormalised": ("olmoe", rerouted(renormalise=True)),
    "softmax before the choice": ("mixtral, windowed", rerouted(score="softmax")),
    "softmax behind the choice": ("olmoe", rerouted(score="softmax_of_chosen")),
    "fewer experts": ("granite", rerouted(top_k=2)),
    "no gate of the shared expert": ("qwen2, shared and gated, a dense layer", ungated),
    "no shared expert": ("granite, shared", lambda feed: replace(feed, shared=None)),
    "no shared expert in granite 4": ("granite 4", lambda feed: replace(feed, shared=None)),
    "no correction": ("ernie, corrected, shared, a dense layer", lambda feed: replace(feed, correction_dims=0)),
    "softmax for sparsemixer": ("phi", rerouted(score="softmax")),
    "no margin": ("phi", rerouted(margin=0.0)),
    "a wide margin": ("phi", rerouted(margin=1e3)),
    "no scale": ("glm, groups, scaled, dense first layers", rerouted(scale=1.0)),
    "no groups": ("glm, groups, scaled, dense first layers", rerouted(groups=1, top_groups=1)),
    "groups by their best alone": ("glm, groups, scaled, dense first layers", rerouted(group_score="max")),
    "softmax for sigmoid": ("glm, groups, scaled, dense first layers", rerouted(score="softmax")),
    "no scale in solar": ("solar, groups, scaled, biased", rerouted(scale=1.0)),
    "no groups in solar": ("solar, groups, scaled, biased", rerouted(groups=1, top_groups=1)),
    "renormalised in solar": ("solar, not renormalised, yarn", rerouted(renormalise=True)),
    "no correction in solar": ("solar, groups, scaled, biased", lambda feed: replace(feed, correction_dims=0)),
    "no shared expert in solar": ("solar, groups, scaled, biased", lambda feed: replace(feed, shared=None)),
    "no biases of experts": ("gpt-oss, windowed", lambda feed: replace(feed, biased=False)),
    "silu for the clamped gate": ("gpt-oss, windowed", lambda feed: replace(feed, activation="silu")),
    "softmax of all before the choice": ("gpt-oss, windowed", rerouted(score="softmax")),
    "another activation": ("olmoe", lambda feed: replace(feed, activation="gelu_tanh")),
}


@pytest.mark.parametrize("native", OPERATIONS)
@pytest.mark.parametrize("bug", BUGS)
def test_a_planted_bug_changes_logits(bug: str, native: bool, tmp_path: Path) -> None:
    """Were a rule without effect on these checkpoints, the tests above would not notice that it is broken."""
    family, change = BUGS[bug]
    model, sequences, expected = reference(family)
    model.save_pretrained(tmp_path)
    spec = from_hf(read_hf_config(tmp_path))
    if native and not runs_native(spec):
        pytest.skip("a variant of attention, which torch's operations compute")
    layers = tuple(
        replace(layer, feed=change(layer.feed)) if isinstance(layer.feed, ExpertsFeed) else layer
        for layer in spec.layers
    )
    assert differs(tmp_path, spec, replace(spec, layers=layers), sequences[0], expected[0], native)


GRANITES = ("granite", "granite, shared", "granite 4")
GPT_OSS, GLM = "gpt-oss, windowed", "glm, groups, scaled, dense first layers"
SOLAR = "solar, groups, scaled, biased"
ERNIE, PHI = "ernie, corrected, shared, a dense layer", "phi, windowed, every bias, longrope"
QWEN3 = "qwen3, renormalised, biased, a dense layer"
NORMED_HEADS = (QWEN3, GLM)
WINDOWED = [family for family in FAMILIES if "windowed" in family]


def without_magnitudes(spec: DecoderSpec) -> DecoderSpec:
    """Leave the rotations of longrope as long as they are without it."""
    (rope,) = spec.ropes
    assert isinstance(rope.scaling, LongRope)
    return ropes(scaling=replace(rope.scaling, magnitudes=(1.0, 1.0)))(spec)


WRONG: list[tuple[str, str, Bug]] = [
    *((family, "no window", misread(attention(window=None))) for family in WINDOWED),
    (GPT_OSS, "a rope that is not stretched", misread(plain_ropes)),
    (GPT_OSS, "a ramp from pair to pair", misread(ropes(scaling=Yarn(4.0, 32)))),
    (GPT_OSS, "no bias of the router", zeroed("router_bias_X")),
    *((family, "heads not normed", without("q_norm_D", "k_norm_D")) for family in NORMED_HEADS),
    *((family, "each other's norms", misread(exchanged("q_norm", "k_norm"))) for family in NORMED_HEADS),
    *((family, "embeddings not scaled", misread(whole(embedding_scale=1.0))) for family in GRANITES),
    *((family, "results not scaled", misread(whole(embedding_scale=6.0))) for family in GRANITES),
    *((family, "logits not scaled", misread(whole(logits_scale=1.0))) for family in GRANITES),
    *((family, "scores over the root of the size of a head", misread(attention(scale=None))) for family in GRANITES),
    (SOLAR, "no biases of queries, keys and values", zeroed("qkv_bias")),
    ("solar, not renormalised, yarn", "a rope that is not stretched", misread(plain_ropes)),
    (GLM, "all of each head rotated", misread(attention(rotary_dim=None))),
    (ERNIE, "pairs half a head apart", misread(attention(interleaved=False))),
    (PHI, "no magnitude", misread(without_magnitudes)),
    (PHI, "no bias of the head", zeroed("head_bias_V")),
]


@pytest.mark.parametrize(("family", "bug", "planted"), WRONG)
def test_a_bug_outside_the_experts_changes_logits(family: str, bug: str, planted: Bug, tmp_path: Path) -> None:
    model, sequences, expected = reference(family)
    model.save_pretrained(tmp_path)
    assert is_caught(planted, tmp_path, sequences[0], expected[0]), bug


def test_sinks_change_logits(tmp_path: Path) -> None:
    model, sequences, expected = reference("gpt-oss, windowed")
    model.save_pretrained(tmp_path)
    spec = from_hf(read_hf_config(tmp_path))
    change_tensors(tmp_path, lambda tensors: [tensors[name].fill_(-50.0) for name in tensors if "sinks" in name])
    assert differs(tmp_path, spec, spec, sequences[0], expected[0], native=False)


def test_mxfp4_stacks_are_what_their_numbers_stand_for(tmp_path: Path) -> None:
    """As OpenAI stores gpt-oss: experts in blocks of 32 inputs, all else in plain numbers."""
    model, sequences, _ = reference("gpt-oss, windowed")
    wide = type(model.config)(**(model.config.to_dict() | {"intermediate_size": 64}))
    torch.manual_seed(3)
    model = type(model)(wide).eval()
    model.save_pretrained(tmp_path)
    write, drawn, plain = mxfp4("blocks", "scales", blocked=True), np.random.default_rng(5), dict[str, Tensor]()

    def pack(tensors: dict[str, Tensor]) -> None:
        for name in [each for each in tensors if each.endswith(("gate_up_proj", "down_proj"))]:
            experts, ins, outs = tensors.pop(name).shape
            made = [write(drawn, outs, ins) for _ in range(experts)]
            for part in ("blocks", "scales"):
                tensors[f"{name}_{part}"] = torch.stack([parts[part] for parts, _ in made])
            plain[name] = torch.from_numpy(np.stack([values.T for _, values in made]))

    change_tensors(tmp_path, pack)
    config = json.loads((tmp_path / "config.json").read_text())
    left = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]
    config["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": left}
    (tmp_path / "config.json").write_text(json.dumps(config))
    model.load_state_dict(plain, strict=False)
    _, tested = ModelUnderTest.load(tmp_path)
    with torch.inference_mode():
        wanted = model(torch.tensor([sequences[0]])).logits[0]
    (found,) = tested.logits(sequences[:1], 9)
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-4 * float(wanted.abs().max()))
    weights = load_weights(tmp_path, from_hf(config), dtype=torch.float32, device="cpu", keep_packed=True)
    assert {weights.layers[0].feed.matrices[name].format.name for name in ("gate_up_3", "down_7")} == {"mxfp4"}
    scales = "model.layers.1.mlp.experts.down_proj_scales"
    change_tensors(tmp_path, lambda tensors: tensors[scales][7, 3].fill_(255))
    with pytest.raises(ModelRejected, match=rf"{scales} is nan at \[7, 3, 0\]"):
        load_weights(tmp_path, from_hf(config), dtype=torch.float32, device="cpu")


@pytest.mark.parametrize(
    ("changes", "field"),
    [({"swiglu_limit": 5.0}, "swiglu_limit"), ({"swiglu_alpha": 1.0}, "swiglu_alpha"), ({"rope_parameters": None}, "")],
)
def test_a_gpt_oss_with_another_gate_or_an_unnamed_rope_is_refused(changes: dict[str, Any], field: str) -> None:
    model, _, _ = reference("gpt-oss, windowed")
    config = json.loads(model.config.to_json_string()) | {"architectures": ["GptOssForCausalLM"]} | changes
    with pytest.raises(ModelRejected) as caught:
        from_hf(config)
    assert field in str(caught.value.field)


@pytest.mark.parametrize("native", OPERATIONS)
def test_a_correction_in_the_weights_changes_logits(
    native: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def corrected(logits_NX: Tensor, routing: Routing, correction_X: Tensor | None, _: None) -> Choice:
        choice = route(logits_NX, routing, correction_X)
        assert correction_X is not None
        weights_NK = (torch.softmax(logits_NX, 1) + correction_X).gather(1, choice.ids_NK.long())
        return Choice(choice.ids_NK, weights_NK / weights_NK.sum(1, keepdim=True))

    for module in ("headrace.ops.cpu.experts.route", "headrace.ops.cpu.native.experts.route"):
        monkeypatch.setattr(module, corrected)
    model, sequences, expected = reference("ernie, corrected, shared, a dense layer")
    model.save_pretrained(tmp_path)
    spec = from_hf(read_hf_config(tmp_path))
    assert differs(tmp_path, spec, spec, sequences[0], expected[0], native)


def test_experts_in_another_order_change_logits(tmp_path: Path) -> None:
    model, sequences, expected = reference("olmoe")
    model.save_pretrained(tmp_path)
    spec = from_hf(read_hf_config(tmp_path))
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    first, second = ("model.layers.1.mlp.experts.2.up_proj.weight", "model.layers.1.mlp.experts.3.up_proj.weight")
    tensors[first], tensors[second] = tensors[second], tensors[first]
    save_file(tensors, path)
    assert differs(tmp_path, spec, spec, sequences[0], expected[0], native=False)


def differs(
    folder: Path, stored: DecoderSpec, spec: DecoderSpec, ids: list[int], expected: Tensor, native: bool
) -> bool:
    """Whether a model with the weights of one spec and the arithmetic of another gives other logits."""
    weights = load_weights(folder, stored, dtype=torch.float32, device="cpu")
    return difference(spec, weights, ids, expected, native=native) > 0.01


@pytest.mark.parametrize("name", ["qwen3, renormalised, biased, a dense layer", "granite, shared"])
def test_tensors_of_all_experts_and_of_each_are_the_same(name: str, tmp_path: Path) -> None:
    """As transformers 5 holds them in memory, and as Granite's would be with a tensor for each."""
    model, sequences, _ = reference(name)
    model.save_pretrained(tmp_path)
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    _, before = ModelUnderTest.load(tmp_path)
    wanted = before.logits(sequences[:1], 128)[0]
    save_file(unstacked(tensors) if "granite" in name else stacked(tensors), path)
    _, after = ModelUnderTest.load(tmp_path)
    assert torch.equal(after.logits(sequences[:1], 128)[0], wanted)


LATER = {
    "mixtral, windowed": {"block_sparse_moe": "mlp"},
    "phi": {"block_sparse_moe.gate": "mlp.router", "block_sparse_moe": "mlp"},
    "granite": {"router.layer": "router", "input_linear.weight": "experts.gate_up_proj"},
}


@pytest.mark.parametrize("name", LATER)
def test_later_names_of_transformers_hold_the_same_model(name: str, tmp_path: Path) -> None:
    """Those of its modules, under which it does not write a model that was published under others, unless asked to."""
    model, sequences, _ = reference(name)
    model.save_pretrained(tmp_path)
    _, before = ModelUnderTest.load(tmp_path)
    wanted = before.logits(sequences[:1], 128)[0]
    published = set(load_file(tmp_path / "model.safetensors"))
    model.save_pretrained(tmp_path, save_original_format=False)
    found = set(load_file(tmp_path / "model.safetensors"))
    renamed = LATER[name]
    assert found != published and all(any(new in each for each in found - published) for new in renamed.values())
    _, after = ModelUnderTest.load(tmp_path)
    assert torch.equal(after.logits(sequences[:1], 128)[0], wanted)
    change_tensors(tmp_path, lambda tensors: tensors.update({"model.layers.0.mlp.other.weight": torch.ones(2)}))
    with pytest.raises(ModelRejected, match=r"mlp\.other\.weight"):
        ModelUnderTest.load(tmp_path)


def stacked(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    found = {name: tensor for name, tensor in tensors.items() if ".experts." not in name}
    for layer in {name.split(".")[2] for name in tensors if ".experts." in name}:
        prefix = f"model.layers.{layer}.mlp.experts"
        each = [
            [tensors[f"{prefix}.{expert}.{kind}_proj.weight"] for expert in range(8)] for kind in ("gate", "up", "down")
        ]
        gate, up, down = map(torch.stack, each)
        found |= {f"{prefix}.gate_up_proj": torch.cat((gate, up), 1), f"{prefix}.down_proj": down}
    assert len(found) < len(tensors)
    return found


def unstacked(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    found = dict(tensors)
    for name in tensors:
        if "block_sparse_moe.input_linear" in name or "block_sparse_moe.output_linear" in name:
            prefix, stack = name.rsplit(".", 2)[0], found.pop(name)
            for expert, matrix in enumerate(stack):
                rows = dict(zip(("gate", "up"), matrix.chunk(2), strict=True)) if "input" in name else {"down": matrix}
                found |= {f"{prefix}.experts.{expert}.{kind}_proj.weight": each for kind, each in rows.items()}
    assert len(found) > len(tensors)
    return {name: tensor.contiguous() for name, tensor in found.items()}


def test_configs_of_older_transformers_are_read_alike(tmp_path: Path) -> None:
    """They call the number of experts `num_experts`."""
    model, _, _ = reference("qwen3, renormalised, biased, a dense layer")
    config = json.loads(model.config.to_json_string()) | {"architectures": ["Qwen3MoeForCausalLM"]}
    older = {name: value for name, value in config.items() if name != "num_local_experts"} | {"num_experts": 8}
    assert from_hf(older) == from_hf(config)
