"""Tiny checkpoints with latent attention give the logits and tokens that transformers gives, in whatever steps."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from adapter_folders import peft_model
from against_transformers import CUTS, check_bits, check_cuts, check_engine, difference, drawn_with_logits
from model_driver import OPERATIONS, ModelUnderTest
from planted_bugs import change_tensors
from safetensors.torch import save_file
from torch import Tensor

from headrace.adapters.errors import AdapterRejected
from headrace.adapters.files import read_adapter
from headrace.adapters.peft_config import CONFIG_FILE, WEIGHTS_FILE
from headrace.engine import ModelRejected
from headrace.engine.model.checkpoint.weights import load_weights
from headrace.engine.model.cpu.adapters import CpuBank
from headrace.engine.model.experts import ExpertsFeed
from headrace.engine.model.families.registry import from_hf, read_hf_config
from headrace.engine.model.latent import LatentAttention
from headrace.engine.model.shared.adapter_device import adapter_shape
from headrace.engine.model.spec import DecoderSpec, DenseFeed, LayerSpec
from headrace.ops.cpu.block import CpuOps
from headrace.ops.cpu.latents import LatentPages

HEADS, PLAIN, VALUE, LATENT = 4, 12, 20, 16
SIZES: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 48,
    "moe_intermediate_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": HEADS,
    "num_key_value_heads": HEADS,
    "kv_lora_rank": LATENT,
    "q_lora_rank": 24,
    "qk_nope_head_dim": PLAIN,
    "qk_rope_head_dim": 8,
    "v_head_dim": VALUE,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "max_position_embeddings": 128,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
PLAIN_ROPE = {"rope_type": "default", "rope_theta": 500.0}
YARN = {
    "rope_type": "yarn", "rope_theta": 500.0, "factor": 8.0, "original_max_position_embeddings": 16, "beta_fast": 4.0,
    "beta_slow": 0.5, "mscale": 0.7, "mscale_all_dim": 1.2,
}  # fmt: skip
Made = Callable[[], Any]


def made(name: str, **changes: Any) -> Made:
    config, model = (getattr(transformers, f"{name}{end}") for end in ("Config", "ForCausalLM"))
    return lambda: model(config(**({"rope_parameters": PLAIN_ROPE} | SIZES | changes)))


GROUPS = {"n_group": 4, "topk_group": 2}
FAMILIES: dict[str, Made] = {
    "v2-lite": made(
        "DeepseekV2", q_lora_rank=None, topk_method="greedy", n_shared_experts=2, first_k_dense_replace=1,
        rope_parameters=YARN,
    ),
    "v2": made(
        "DeepseekV2", **GROUPS, topk_method="group_limited_greedy", routed_scaling_factor=3.0, n_shared_experts=1,
        first_k_dense_replace=2, attention_bias=True, rope_parameters=YARN,
    ),
    "v3": made(
        "DeepseekV3", **GROUPS, routed_scaling_factor=2.5, first_k_dense_replace=1, attention_bias=True,
        rope_parameters=YARN,
    ),
    "v3, halves": made(
        "DeepseekV3", n_group=1, topk_group=1, first_k_dense_replace=0, q_lora_rank=None, rope_interleave=False,
        norm_topk_prob=False,
    ),
    "flash": made("Glm4MoeLite", **GROUPS, rms_norm_eps=1e-3, mlp_layer_types=["dense", "sparse", "sparse"]),
}  # fmt: skip
LENGTHS = (64, 40, 17)


@cache
def reference(family: str) -> tuple[Any, list[list[int]], list[Tensor]]:
    """A model whose every parameter matters, sequences, and their logits in one piece by transformers."""
    torch.manual_seed(11)
    model = FAMILIES[family]().eval()
    for name, parameter in [*model.named_parameters(), *model.named_buffers()]:
        if "inv_freq" in name:
            continue
        mean, spread = (1.0, 0.2) if "norm" in name else (0.0, 0.3 if "bias" in name else 0.15)
        if family == "flash" and "_a_proj" in name:
            spread = 0.002  # latent vectors so small that the epsilon of their norm matters
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
    kinds = {type(layer.feed) for layer in spec.layers}
    assert kinds == ({ExpertsFeed} if family == "v3, halves" else {ExpertsFeed, DenseFeed})
    assert {type(layer.mixer) for layer in spec.layers} == {LatentAttention}
    check_cuts(tested, sequences, expected)


def test_an_engine_generates_and_embeds_what_transformers_does(family: str, tmp_path: Path) -> None:
    model, sequences, _ = reference(family)
    model.save_pretrained(tmp_path)
    assert from_hf(read_hf_config(tmp_path)).cached_elements == 3 * (LATENT + 8)
    check_engine(tmp_path, model, sequences[0])


def test_an_answer_has_the_same_bits_in_every_company(family: str, tmp_path: Path) -> None:
    """In bfloat16, alone and with others, in chunks and at once, where C multiplies."""
    if len(OPERATIONS) != 2 or OPERATIONS[1].marks[0].args[0]:
        pytest.skip("no compiled kernels")
    model, sequences, _ = reference(family)
    model.save_pretrained(tmp_path)
    _, tested = ModelUnderTest.load(tmp_path, torch.bfloat16, native=True)
    check_bits(tested, sequences)


ENDS = r"(q|q_a|q_b|o|gate|up|down)_proj|kv_a_proj_with_mqa|lm_head|embed_tokens"


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("native", OPERATIONS)
@pytest.mark.parametrize("worn_by", ["v2-lite", "v3", "flash"])
def test_an_adapter_gives_what_peft_gives(worn_by: str, native: bool, tmp_path: Path) -> None:
    """Of queries with a latent vector and without, of what is cached, and of dense and shared feeds; in two cuts."""
    model, sequences, plain = reference(worn_by)
    model.save_pretrained(tmp_path / "base")
    torch.manual_seed(2)
    wrapped = peft_model(copy.deepcopy(model), r=4, target_modules=rf"(.*\.)?({ENDS})")
    wrapped.save_pretrained(tmp_path / "adapter")
    with torch.inference_mode():
        expected = wrapped(input_ids=torch.tensor([sequences[2]])).logits[0]
    assert float((expected - plain[2]).abs().max()) > 0.05, "the adapter does nothing"
    spec, tested = ModelUnderTest.load(tmp_path / "base", native=native)
    tested.bank = CpuBank(2, 8, torch.float32)
    loaded = read_adapter(tmp_path / "adapter", adapter_shape(spec), torch.float32, max_rank=8)
    attention = 4 if spec.layers[0].mixer.query_latent_dim else 3
    assert len(loaded.layout.places()) == 3 * (attention + 3) + 2
    tested.bank.put(1, 0, loaded)
    for chunk, prompt in (CUTS["in one piece"], CUTS["decode after chunks"]):
        found = tested.logits([sequences[1], sequences[2]], chunk, prompt, [-1, 1])
        torch.testing.assert_close(found[0], plain[1], rtol=0, atol=1e-4)
        torch.testing.assert_close(found[1], expected, rtol=0, atol=2e-4)


@pytest.mark.parametrize("module", ["self_attn.kv_b_proj", "mlp.experts.1.up_proj", "mlp.gate"])
def test_an_adapter_of_what_no_update_reaches_is_refused_by_name(module: str, tmp_path: Path) -> None:
    reference("v3")[0].save_pretrained(tmp_path / "base")
    shape = adapter_shape(from_hf(read_hf_config(tmp_path / "base")))
    key = f"base_model.model.model.layers.1.{module}.lora"
    save_file({f"{key}_A.weight": torch.ones(4, 16), f"{key}_B.weight": torch.ones(8, 4)}, tmp_path / WEIGHTS_FILE)
    (tmp_path / CONFIG_FILE).write_text(json.dumps({"peft_type": "LORA", "r": 4}))
    told = rf"{module}.*self_attn\.q_b_proj.*experts and their routers take none and self_attn\.kv_b_proj takes none"
    with pytest.raises(AdapterRejected, match=told):
        read_adapter(tmp_path, shape, torch.float32, max_rank=8)


def mixed(**changes: Any) -> Callable[[LayerSpec], LayerSpec]:
    def change(layer: LayerSpec) -> LayerSpec:
        assert isinstance(layer.mixer, LatentAttention)
        return replace(layer, mixer=replace(layer.mixer, **changes))

    return change


def rerouted(**changes: Any) -> Callable[[LayerSpec], LayerSpec]:
    def change(layer: LayerSpec) -> LayerSpec:
        feed = layer.feed
        return (
            replace(layer, feed=replace(feed, routing=replace(feed.routing, **changes)))
            if isinstance(feed, ExpertsFeed)
            else layer
        )

    return change


def uncorrected(layer: LayerSpec) -> LayerSpec:
    return replace(layer, feed=replace(layer.feed, correction_dims=0)) if isinstance(layer.feed, ExpertsFeed) else layer


def unscaled(power: int) -> Callable[[LayerSpec], LayerSpec]:
    """Divide scores by a power of the factor of yarn, of which they have the square."""

    def change(layer: LayerSpec) -> LayerSpec:
        factor = 0.1 * YARN["mscale_all_dim"] * torch.tensor(YARN["factor"]).log().item() + 1.0
        assert isinstance(layer.mixer, LatentAttention)
        return replace(layer, mixer=replace(layer.mixer, scale=layer.mixer.scale / factor**power))

    return change


BUGS: dict[str, tuple[str, Callable[[LayerSpec], LayerSpec]]] = {
    "the factor of yarn once": ("v3", unscaled(1)),
    "no factor of yarn": ("v2-lite", unscaled(2)),
    "halves for neighbours": ("v2", mixed(interleaved=False)),
    "neighbours for halves": ("v3, halves", mixed(interleaved=True)),
    "the stream's epsilon for latent vectors": ("flash", mixed(latent_epsilon=1e-3)),
    "no biases": ("v3", mixed(biased=False)),
    "no groups": ("v2", rerouted(groups=1, top_groups=1)),
    "groups by their two best": ("v2", rerouted(group_score="top2")),
    "groups by their best": ("v3", rerouted(group_score="max")),
    "renormalised": ("v2", rerouted(renormalise=True)),
    "not renormalised": ("v3", rerouted(renormalise=False)),
    "not scaled": ("v2", rerouted(scale=1.0)),
    "no correction": ("v3", uncorrected),
}


@pytest.mark.parametrize("bug", BUGS)
def test_a_planted_bug_changes_logits(bug: str, tmp_path: Path) -> None:
    """Were a rule without effect on these checkpoints, the tests above would not notice that it is broken."""
    family, change = BUGS[bug]
    model, sequences, expected = reference(family)
    model.save_pretrained(tmp_path)
    spec = from_hf(read_hf_config(tmp_path))
    other = replace(spec, layers=tuple(map(change, spec.layers)))
    assert other != spec
    assert differs(tmp_path, spec, other, sequences[0], expected[0])


def test_another_magnitude_of_the_rope_changes_logits(tmp_path: Path) -> None:
    model, sequences, expected = reference("v2")
    model.save_pretrained(tmp_path)
    spec = from_hf(read_hf_config(tmp_path))
    assert spec.ropes[0].magnitude != 1.0
    other = replace(spec, ropes=(replace(spec.ropes[0], magnitude=1.0),))
    assert differs(tmp_path, spec, other, sequences[0], expected[0])


@pytest.mark.parametrize("bug", ["no norm", "the first elements rotated", "the key unrotated", "keys and values"])
def test_a_bug_of_the_arithmetic_changes_logits(bug: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, sequences, expected = reference("v3")
    model.save_pretrained(tmp_path)
    rotated = LatentPages._rotated

    def first(pages: LatentPages, x_NHD: Tensor, step: Any) -> Tensor:
        x_NHD = x_NHD.roll(pages.rotated_dim, 2) if bug == "the first elements rotated" else x_NHD
        return x_NHD.float() if bug == "the key unrotated" and x_NHD.shape[1] == 1 else rotated(pages, x_NHD, step)

    if bug == "no norm":
        monkeypatch.setattr(CpuOps, "norm_with", lambda _, x_NC, weight_C, epsilon: x_NC * weight_C)
    elif bug == "keys and values":

        def exchange(tensors: dict[str, Tensor]) -> None:
            for name in [each for each in tensors if "kv_b_proj" in each]:
                key, value = tensors[name].view(HEADS, PLAIN + VALUE, LATENT).split((PLAIN, VALUE), 1)
                tensors[name] = torch.cat((value, key), 1).reshape(-1, LATENT)

        change_tensors(tmp_path, exchange)
    else:
        monkeypatch.setattr(LatentPages, "_rotated", first)
    spec = from_hf(read_hf_config(tmp_path))
    assert differs(tmp_path, spec, spec, sequences[0], expected[0])


def differs(folder: Path, stored: DecoderSpec, spec: DecoderSpec, ids: list[int], expected: Tensor) -> bool:
    """Whether a model with the weights of one spec and the arithmetic of another gives other logits."""
    weights = load_weights(folder, stored, dtype=torch.float32, device="cpu")
    changed = tuple(replace_biases(weights.layers[layer], each) for layer, each in enumerate(spec.layers))
    return difference(spec, replace(weights, layers=changed), ids, expected) > 0.01


def replace_biases(weights: Any, layer: LayerSpec) -> Any:
    """Weights without the biases of attention for a layer that has none."""
    assert isinstance(layer.mixer, LatentAttention)
    if layer.mixer.biased:
        return weights
    kept = {name: vector for name, vector in weights.mixer.vectors.items() if not name.endswith("_bias")}
    return replace(weights, mixer=replace(weights.mixer, vectors=kept))


@pytest.mark.parametrize(
    ("family", "changes", "field"),
    [
        ("v2", {"norm_topk_prob": True}, "norm_topk_prob"),
        ("v2", {"topk_method": "noaux_tc"}, "topk_method"),
        ("v2", {"scoring_func": "sigmoid"}, "scoring_func"),
        ("v2", {"moe_layer_freq": 2}, "moe_layer_freq"),
        ("v2", {"mlp_bias": True}, "mlp_bias"),
        ("v3", {"topk_method": "greedy"}, "topk_method"),
        ("v3", {"n_group": 3}, "n_group"),
        ("v3", {"num_key_value_heads": 2}, "num_key_value_heads"),
        ("v3", {"qk_rope_head_dim": 7}, "qk_rope_head_dim"),
        ("v3", {"first_k_dense_replace": -1}, "first_k_dense_replace"),
        ("v3", {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "mscale_all_dim": 1.0}}, "mscale_all_dim"),
        ("flash", {"mlp_layer_types": ["dense", "sparse"]}, "mlp_layer_types"),
        ("flash", {"first_k_dense_replace": 2}, "mlp_layer_types"),
    ],
)
def test_what_is_not_computed_is_refused_by_name(family: str, changes: dict[str, Any], field: str) -> None:
    model, _, _ = reference(family)
    config = json.loads(model.config.to_json_string()) | {"architectures": [type(model).__name__]}
    from_hf(config)
    with pytest.raises(ModelRejected) as caught:
        from_hf(config | changes)
    assert caught.value.field == field
