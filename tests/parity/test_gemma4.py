"""Tiny checkpoints of Gemma 4 give the logits and tokens that transformers gives, in whatever steps."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers
from against_transformers import check_bits, check_cuts, check_engine, difference, drawn_with_logits
from model_driver import OPERATIONS, ModelUnderTest
from safetensors.torch import load_file, save_file
from torch import Tensor

from headrace.adapters.files import read_adapter
from headrace.adapters.peft_config import CONFIG_FILE, WEIGHTS_FILE
from headrace.engine import AdapterRejected, ModelRejected
from headrace.engine.model.checkpoint.weights import load_weights
from headrace.engine.model.cpu.adapters import CpuBank
from headrace.engine.model.experts import ExpertsBesideDense
from headrace.engine.model.families.registry import from_hf, read_hf_config
from headrace.engine.model.rope import Proportional, Rope
from headrace.engine.model.shared.adapter_device import adapter_shape
from headrace.engine.model.spec import DecoderSpec, LayerSpec
from headrace.engine.model.value_normed import ValueNormedAttention
from headrace.ops.cpu.block import CpuOps
from headrace.ops.cpu.experts import CpuExperts

WINDOW = 13  # shorter than every prompt, and no multiple of a page
TYPES = ["sliding_attention", "sliding_attention", "full_attention"] * 2
FULL = {"rope_type": "proportional", "partial_rotary_factor": 0.5, "rope_theta": 300.0}
SIZES: dict[str, Any] = {
    "vocab_size": 96,
    "vocab_size_per_layer_input": 96,
    "hidden_size": 64,
    "hidden_size_per_layer_input": 0,
    "intermediate_size": 56,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "global_head_dim": 24,
    "max_position_embeddings": 128,
    "sliding_window": WINDOW,
    "layer_types": TYPES,
    "rope_parameters": {"full_attention": FULL, "sliding_attention": {"rope_type": "default", "rope_theta": 50.0}},
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
LARGE = {"attention_k_eq_v": True, "num_global_key_value_heads": 1, "final_logit_softcapping": 2.0}
EXPERTS = {"enable_moe_block": True, "num_experts": 8, "top_k_experts": 3, "moe_intermediate_size": 32}
SMALL = {"hidden_size_per_layer_input": 10, "num_kv_shared_layers": 2, "layer_types": ["sliding_attention", *TYPES[:5]]}
MODELS: dict[str, dict[str, Any]] = {
    "dense": LARGE,
    "dense, biased, untied": {**LARGE, "attention_bias": True, "tie_word_embeddings": False},
    "experts": LARGE | EXPERTS,
    "small": {**SMALL, "use_double_wide_mlp": True},
    "small, heads alike, three shared": {
        **SMALL,
        "num_kv_shared_layers": 3,
        "global_head_dim": 16,
        "layer_types": TYPES,
    },
}
ELEMENTS = {"dense": 4 * 2 * 2 * 16 + 2 * 2 * 24, "experts": 4 * 2 * 2 * 16 + 2 * 2 * 24}
ELEMENTS["dense, biased, untied"] = ELEMENTS["dense"]
ELEMENTS["small"] = 3 * 2 * 2 * 16 + 2 * 2 * 24
ELEMENTS["small, heads alike, three shared"] = 3 * 2 * 2 * 16
"""Elements that a token has in the cache."""
LENGTHS = (64, 40, 17)


def made(**changes: Any) -> Any:
    return transformers.Gemma4ForCausalLM(transformers.Gemma4TextConfig(**(SIZES | changes)))


@cache
def reference(name: str) -> tuple[Any, list[list[int]], list[Tensor]]:
    """A model whose every parameter matters, sequences, and their logits in one piece by transformers."""
    torch.manual_seed(11)
    model = made(**MODELS[name]).eval()
    for parameter, values in [*model.named_parameters(), *model.named_buffers()]:
        if "inv_freq" not in parameter and "embed_scale" not in parameter:
            is_factor = "norm" in parameter or "scal" in parameter
            torch.nn.init.normal_(values, float(is_factor), 0.25 if is_factor else 0.15)
    return model, *drawn_with_logits(model, LENGTHS)


@pytest.fixture(params=MODELS)
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.mark.parametrize("native", OPERATIONS)
def test_logits_equal_those_of_transformers_for_any_cut(name: str, native: bool, tmp_path: Path) -> None:
    model, sequences, expected = reference(name)
    model.save_pretrained(tmp_path)
    spec, tested = ModelUnderTest.load(tmp_path, native=native)
    assert spec.windows == tuple(WINDOW if kind != "full_attention" else None for kind in model.config.layer_types)
    assert spec.cached_elements == ELEMENTS[name]
    check_cuts(tested, sequences, expected)


def test_an_engine_generates_and_embeds_what_transformers_does(name: str, tmp_path: Path) -> None:
    """Where pages run out, they are computed once more, or swapped."""
    model, sequences, _ = reference(name)
    model.save_pretrained(tmp_path)
    check_engine(tmp_path, model, sequences[0])
    assert check_engine(tmp_path, model, sequences[0], swap_memory="1MiB").swaps


def test_an_answer_has_the_same_bits_in_every_company(name: str, tmp_path: Path) -> None:
    """In bfloat16, alone and with others, in chunks and at once, where C multiplies."""
    if len(OPERATIONS) != 2 or OPERATIONS[1].marks[0].args[0]:
        pytest.skip("no compiled kernels")
    model, sequences, _ = reference(name)
    model.save_pretrained(tmp_path)
    _, tested = ModelUnderTest.load(tmp_path, torch.bfloat16, native=True)
    check_bits(tested, sequences)


UPDATED = {
    "dense": ["q_proj", "k_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "embed_tokens"],
    "experts": ["q_proj", "k_proj", "o_proj", "gate_proj", "up_proj", "down_proj"],
    "small": ["q_proj", "v_proj", "o_proj", "up_proj", "down_proj"],
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("native", OPERATIONS)
@pytest.mark.parametrize("name", UPDATED)
def test_adapters_update_layers_of_different_sizes(name: str, native: bool, tmp_path: Path) -> None:
    model, sequences, plain = reference(name)
    model.save_pretrained(tmp_path / "base")
    config = peft.LoraConfig(r=4, target_modules=rf".*\.({'|'.join(UPDATED[name])})")
    wrapped = peft.get_peft_model(copy.deepcopy(model), config).eval()
    torch.manual_seed(2)
    for parameter in wrapped.parameters():
        if parameter.requires_grad:
            torch.nn.init.normal_(parameter, 0.0, 0.15)
    wrapped.save_pretrained(tmp_path / "adapter")
    with torch.inference_mode():
        expected = wrapped(input_ids=torch.tensor([sequences[0]])).logits[0]
    assert float((expected - plain[0]).abs().max()) > 0.05, "the adapter does nothing"
    spec, tested = ModelUnderTest.load(tmp_path / "base", native=native)
    tested.bank = CpuBank(2, 8, torch.float32)
    tested.bank.put(1, 0, read_adapter(tmp_path / "adapter", adapter_shape(spec), torch.float32, max_rank=8))
    found = tested.logits([sequences[1], sequences[0]], 7, 30, [-1, 1])
    torch.testing.assert_close(found[0], plain[1], rtol=0, atol=1e-4)
    torch.testing.assert_close(found[1], expected, rtol=0, atol=2e-4)


@pytest.mark.parametrize(
    ("name", "tensor"),
    [
        ("dense", "layers.2.self_attn.v_proj"),  # its values are its keys
        ("small", "layers.5.self_attn.k_proj"),  # it reads those of an earlier layer
        ("small", "layers.1.per_layer_input_gate"),
        ("experts", "layers.1.router.proj"),
    ],
)
def test_adapters_of_what_a_layer_does_not_have_are_refused(name: str, tensor: str, tmp_path: Path) -> None:
    key = f"base_model.model.model.{tensor}.lora"
    save_file({f"{key}_A.weight": torch.ones(4, 64), f"{key}_B.weight": torch.ones(8, 4)}, tmp_path / WEIGHTS_FILE)
    config: dict[str, Any] = {"peft_type": "LORA", "r": 4, "lora_alpha": 4}
    (tmp_path / CONFIG_FILE).write_text(json.dumps(config | {"target_modules": [tensor.rpartition(".")[2]]}))
    shape = adapter_shape(from_hf(config_of(name)))
    with pytest.raises(AdapterRejected, match=tensor):
        read_adapter(tmp_path, shape, torch.float32, max_rank=8)
    (tmp_path / CONFIG_FILE).write_text(json.dumps({"peft_type": "PROMPT_TUNING", "num_virtual_tokens": 3}))
    with pytest.raises(AdapterRejected, match="no virtual tokens"):
        read_adapter(tmp_path, shape, torch.float32, max_rank=8)


def mixed(**changes: Any) -> Callable[[LayerSpec], LayerSpec]:
    return lambda layer: replace(layer, mixer=replace(layer.mixer, **changes))


def of_another_layer(layer: LayerSpec) -> LayerSpec:
    assert isinstance(layer.mixer, ValueNormedAttention)
    return replace(layer, mixer=replace(layer.mixer, source=0)) if layer.mixer.source == 1 else layer


def with_other_ropes(layer: LayerSpec) -> LayerSpec:
    assert isinstance(layer.mixer, ValueNormedAttention)
    return replace(layer, mixer=replace(layer.mixer, rope=1 - layer.mixer.rope))


def weighed_by_sigmoids(layer: LayerSpec) -> LayerSpec:
    assert isinstance(layer.feed, ExpertsBesideDense)
    return replace(layer, feed=replace(layer.feed, routing=replace(layer.feed.routing, score="sigmoid")))


def every(change: Callable[[LayerSpec], LayerSpec]) -> Callable[[DecoderSpec], DecoderSpec]:
    return lambda spec: replace(spec, layers=tuple(map(change, spec.layers)))


def with_full_rope(rope: Rope) -> Callable[[DecoderSpec], DecoderSpec]:
    return lambda spec: replace(spec, ropes=(rope, spec.ropes[1]))


def with_own(**changes: Any) -> Callable[[DecoderSpec], DecoderSpec]:
    return lambda spec: replace(spec, per_layer=replace(spec.per_layer, **changes))


SHARED = "small, heads alike, three shared"
BUGS: dict[str, tuple[str, Callable[[DecoderSpec], DecoderSpec]]] = {
    "scores over the root of the size of a head": ("dense", every(mixed(scale=None))),
    "no window": ("dense", every(mixed(window=None))),
    "ropes exchanged": ("dense", every(with_other_ropes)),
    "all pairs rotated": ("dense", with_full_rope(Rope(300.0))),
    "frequencies of a head as small as its rotated part": ("dense", with_full_rope(Rope(300.0**2, Proportional(0.5)))),
    "no bound of logits": ("dense", lambda spec: replace(spec, logits_cap=None)),
    "embeddings not scaled": ("dense", lambda spec: replace(spec, embedding_scale=1.0)),
    "weights by sigmoids": ("experts", every(weighed_by_sigmoids)),
    "keys and values of another layer": (SHARED, every(of_another_layer)),
    "no embeddings of layers": ("small", lambda spec: replace(every(untailed)(spec), per_layer=None)),
    "rows of layers not scaled": ("small", with_own(scale=1.0)),
}


def untailed(layer: LayerSpec) -> LayerSpec:
    return replace(layer, tail=replace(layer.tail, size=None))


@pytest.mark.parametrize("bug", BUGS)
def test_a_planted_bug_changes_logits(bug: str, tmp_path: Path) -> None:
    """Were a rule without effect on these checkpoints, the tests above would not notice that it is broken."""
    name, change = BUGS[bug]
    model, sequences, expected = reference(name)
    model.save_pretrained(tmp_path)
    spec = from_hf(read_hf_config(tmp_path))
    other = change(spec)
    assert other != spec
    assert differs(tmp_path, spec, other, sequences[0], expected[0])


STORED: dict[str, tuple[str, str, Callable[[Tensor], Tensor]]] = {
    "no factor of a layer": ("dense", "layers.1.layer_scalar", torch.ones_like),
    "norms that lack 1": ("dense", "layers.1.input_layernorm.weight", lambda norm: norm + 1.0),
    "no factor of an expert": ("experts", "layers.1.router.per_expert_scale", torch.ones_like),
    "no norm of the router": ("experts", "layers.1.router.scale", torch.ones_like),
    "no norm behind the dense feed": ("experts", "layers.1.post_feedforward_layernorm_1.weight", torch.ones_like),
    "no norm before experts": ("experts", "layers.1.pre_feedforward_layernorm_2.weight", torch.ones_like),
    "no norm behind experts": ("experts", "layers.1.post_feedforward_layernorm_2.weight", torch.ones_like),
    "no norm of embeddings of layers": ("small", "per_layer_projection_norm.weight", torch.ones_like),
    "no norm behind embeddings of layers": ("small", "layers.1.post_per_layer_input_norm.weight", torch.ones_like),
}


@pytest.mark.parametrize("bug", STORED)
def test_what_a_checkpoint_stores_counts(bug: str, tmp_path: Path) -> None:
    name, tensor, change = STORED[bug]
    model, sequences, expected = reference(name)
    model.save_pretrained(tmp_path)
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    tensors[f"model.{tensor}"] = change(tensors[f"model.{tensor}"])
    save_file(tensors, path)
    spec = from_hf(read_hf_config(tmp_path))
    assert differs(tmp_path, spec, spec, sequences[0], expected[0])


@pytest.mark.parametrize(
    "bug", ["values not normed", "values are normed keys", "a router that reads what experts read"]
)
def test_a_bug_of_the_arithmetic_changes_logits(bug: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, sequences, expected = reference("experts")
    model.save_pretrained(tmp_path)
    norm_values, experts = CpuOps.norm_values, CpuExperts.__call__

    def plain(ops: CpuOps, qkv_NX: Tensor) -> Tensor:
        values = qkv_NX[:, -ops.kv_heads * ops.head_dim :]
        has_values = qkv_NX.shape[1] == (ops.heads + 2 * ops.kv_heads) * ops.head_dim
        return qkv_NX if has_values else torch.cat((qkv_NX, values), 1)

    def of_normed_keys(ops: CpuOps, qkv_NX: Tensor) -> Tensor:
        found = norm_values(ops, qkv_NX)
        keys = model.model.layers[2].self_attn.k_norm.weight if ops.head_dim == 24 else 1.0
        found[:, -ops.kv_heads * ops.head_dim :] *= keys
        return found

    if bug == "values not normed":
        monkeypatch.setattr(CpuOps, "norm_values", plain)
    elif bug == "values are normed keys":
        monkeypatch.setattr(CpuOps, "norm_values", of_normed_keys)
    else:
        monkeypatch.setattr(CpuExperts, "__call__", lambda self, x_NE, _: experts(self, x_NE))
    spec = from_hf(read_hf_config(tmp_path))
    assert differs(tmp_path, spec, spec, sequences[0], expected[0])


def differs(folder: Path, stored: DecoderSpec, spec: DecoderSpec, ids: list[int], expected: Tensor) -> bool:
    """Whether a model with the weights of one spec and the arithmetic of another gives other logits."""
    weights = load_weights(folder, stored, dtype=torch.float32, device="cpu")
    return difference(spec, weights, ids, expected) > 0.01


def test_configs_before_entries_for_each_layer_are_read_alike() -> None:
    """They have fields for the heads of layers without a window."""
    config = config_of("dense")
    older = {name: value for name, value in config.items() if name != "per_layer_config"}
    assert from_hf(older | {"global_head_dim": 24, "num_global_key_value_heads": 1}) == from_hf(config)
    assert from_hf(older) != from_hf(config)
    padded = {f"{int(layer):02}": heads for layer, heads in config["per_layer_config"].items()}
    assert from_hf({**config, "per_layer_config": padded}) == from_hf(config)


def test_a_unified_model_has_no_embeddings_of_layers() -> None:
    """Its configs do not say so."""
    config = config_of("dense")
    short = {name: value for name, value in config.items() if name not in ("hidden_size_per_layer_input", "model_type")}
    unified = from_hf(short | {"architectures": ["Gemma4UnifiedForCausalLM"]})
    assert replace(unified, architecture="Gemma4ForCausalLM") == from_hf(config)
    assert from_hf(short).per_layer is not None
    with pytest.raises(ModelRejected, match="hidden_size_per_layer_input"):
        from_hf(
            config
            | {"architectures": ["Gemma4UnifiedForCausalLM"], "model_type": "gemma4_unified_text"}
            | {"hidden_size_per_layer_input": 8}
        )


def test_keys_and_values_without_a_use_are_left_unread(tmp_path: Path) -> None:
    """Published files hold them for layers that share those of others, too."""
    model, _, _ = reference("small")
    model.save_pretrained(tmp_path)
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    unused = {f"model.layers.5.self_attn.{name}.weight": torch.ones(48, 64) for name in ("k_proj", "v_proj")}
    save_file(tensors | unused, path)
    spec = from_hf(read_hf_config(tmp_path))
    load_weights(tmp_path, spec, dtype=torch.bfloat16, device="cpu")
    save_file(tensors | {"model.layers.3.self_attn.q_proj.bias": torch.ones(64)}, path)
    with pytest.raises(ModelRejected, match="left over"):
        load_weights(tmp_path, spec, dtype=torch.bfloat16, device="cpu")


def config_of(name: str) -> dict[str, Any]:
    model, _, _ = reference(name)
    return {**json.loads(model.config.to_json_string()), "architectures": ["Gemma4ForCausalLM"]}


HEADS = {"head_dim": 24, "num_key_value_heads": 1}


@pytest.mark.parametrize(
    ("name", "changes", "field"),
    [
        ("dense", {"use_bidirectional_attention": "all"}, "use_bidirectional_attention"),
        ("dense", {"per_layer_config": {"2": HEADS}}, "per_layer_config"),
        ("dense", {"per_layer_config": {"2": HEADS, "full": HEADS}}, "per_layer_config"),
        ("dense", {"per_layer_config": {"2": HEADS, "5": HEADS | {"head_dim": 32}}}, "per_layer_config"),
        ("dense", {"per_layer_config": {each: HEADS | {"hidden_size": 32} for each in "25"}}, "per_layer_config"),
        ("dense", {"per_layer_config": {each: {"num_key_value_heads": 3} for each in "25"}}, "num_key_value_heads"),
        ("dense", {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}, "rope_parameters"),
        ("dense", {"hidden_activation": "silu"}, "hidden_activation"),
        ("experts", {"top_k_experts": 9}, "top_k_experts"),
        ("experts", {"moe_intermediate_size": None}, "moe_intermediate_size"),
        ("small", {"num_kv_shared_layers": 6}, "num_kv_shared_layers"),
        ("small", {"num_kv_shared_layers": 3}, "num_kv_shared_layers"),
        ("small", {"vocab_size_per_layer_input": 95}, "vocab_size_per_layer_input"),
    ],
)
def test_what_is_not_computed_is_refused_by_name(name: str, changes: dict[str, Any], field: str) -> None:
    config = config_of(name)
    from_hf(config)
    with pytest.raises(ModelRejected) as caught:
        from_hf(config | changes)
    assert caught.value.field == field


def test_other_families_refuse_what_they_do_not_read() -> None:
    """A config with shared keys and values that is read as another family's would be computed without them."""
    gemma3 = transformers.Gemma3TextConfig(**{name: SIZES[name] for name in ("vocab_size", "hidden_size", "head_dim")})
    config = json.loads(gemma3.to_json_string()) | {"architectures": ["Gemma3ForCausalLM"]}
    from_hf(config)
    for field, value in {
        "num_kv_shared_layers": 2, "attention_k_eq_v": True, "hidden_size_per_layer_input": 8,
        "per_layer_config": {"0": {}}, "enable_moe_block": True,
    }.items():  # fmt: skip
        with pytest.raises(ModelRejected) as caught:
            from_hf(config | {field: value})
        assert caught.value.field == field
