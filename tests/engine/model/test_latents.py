"""Models with latent attention: how their checkpoints are read, what is refused by name, and what is told of them."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import anyio
import numpy as np
import pytest
import tiny_models
import torch
import transformers
from emulated_cuda import emulated
from model_driver import OPERATIONS, ModelUnderTest, capacity
from quantised_checkpoints import CASES
from safetensors.torch import load_file, save_file
from torch import Tensor

from headrace.engine import Engine, EngineConfig, InvalidParams, ModelRejected, SamplingParams
from headrace.engine.inspection.inspect import inspect_model
from headrace.engine.life.build import open_engine
from headrace.engine.model.checkpoint.weights import describe_weights, load_weights
from headrace.engine.model.families.registry import from_hf, read_hf_config
from headrace.engine.model.latent import LatentAttention, uniform_latents
from headrace.engine.model.quantising.run import quantise_folder
from headrace.engine.model.rope import Yarn

SIZES: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 192,
    "intermediate_size": 160,
    "moe_intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "num_key_value_heads": 3,
    "kv_lora_rank": 64,
    "q_lora_rank": 96,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 16,
    "v_head_dim": 64,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 2,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "max_position_embeddings": 256,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
ELEMENTS = 2 * (64 + 16)
"""Elements of a token in the cache: layers, the latent vector, the rotated key."""
LAYER = "model.layers.1.self_attn."
Tensors = dict[str, Tensor]


def latent_model(**changes: Any) -> Any:
    torch.manual_seed(5)
    config = transformers.DeepseekV3Config(**SIZES | changes)
    model = transformers.DeepseekV3ForCausalLM(config).eval()
    for name, parameter in [*model.named_parameters(), *model.named_buffers()]:
        if "norm" not in name and "inv_freq" not in name:
            torch.nn.init.normal_(parameter, 0.0, 0.08)
    return model


def latent_folder(folder: Path, **changes: Any) -> Path:
    latent_model(**changes).save_pretrained(folder)
    tiny_models.write_tokenizer(folder)
    return folder


def change_tensors(folder: Path, change: Callable[[Tensors], object]) -> None:
    path = folder / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path)


def test_a_spec_lists_what_transformers_stores(tmp_path: Path) -> None:
    folder = latent_folder(tmp_path)
    spec = from_hf(read_hf_config(folder))
    weights = load_weights(folder, spec, dtype=torch.float32, device="cpu")
    tensors, mixer = load_file(folder / "model.safetensors"), weights.layers[1].mixer
    assert torch.equal(mixer.matrices["kv_b"].parts["values"], tensors[f"{LAYER}kv_b_proj.weight"])
    assert torch.equal(mixer.matrices["q_b"].dense(torch.float32), tensors[f"{LAYER}q_b_proj.weight"])
    assert spec.cached_elements == ELEMENTS and spec.windows == (None, None)


DAMAGE: dict[str, tuple[Callable[[Tensors], object], str, str]] = {
    "no norm of the latent vector": (
        lambda t: t.pop(f"{LAYER}kv_a_layernorm.weight"), f"{LAYER}kv_a_layernorm.weight", "missing"
    ),
    "queries without a latent vector beside those with one": (
        lambda t: t.update({f"{LAYER}q_proj.weight": torch.ones(144, 192)}), f"{LAYER}q_proj.weight", "left over"
    ),
    "a bias that the config does not have": (
        lambda t: t.update({f"{LAYER}o_proj.bias": torch.ones(192)}), f"{LAYER}o_proj.bias", "left over"
    ),
    "keys without values": (
        lambda t: t.update({f"{LAYER}kv_b_proj.weight": t[f"{LAYER}kv_b_proj.weight"][:96]}),
        f"{LAYER}kv_b_proj.weight", r"\[288, 64\]",
    ),
    "a latent vector without a rotated key": (
        lambda t: t.update({f"{LAYER}kv_a_proj_with_mqa.weight": t[f"{LAYER}kv_a_proj_with_mqa.weight"][:64]}),
        f"{LAYER}kv_a_proj_with_mqa.weight", r"\[80, 192\]",
    ),
    "two layers behind the last": (
        lambda t: t.update({"model.layers.3.eh_proj.weight": torch.ones(192, 384)}),
        "model.layers.3.eh_proj.weight", "left over",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", DAMAGE)
def test_a_damaged_checkpoint_is_refused_by_the_name_of_the_tensor(case: str, tmp_path: Path) -> None:
    change, field, told = DAMAGE[case]
    change_tensors(latent_folder(tmp_path), change)
    with pytest.raises(ModelRejected, match=told) as caught:
        load_weights(tmp_path, from_hf(read_hf_config(tmp_path)), dtype=torch.bfloat16, device="cpu")
    assert caught.value.field == field


def test_a_layer_that_predicts_a_further_token_is_left_unread(tmp_path: Path) -> None:
    further = {"model.layers.2.eh_proj.weight": torch.ones(192, 384), "model.layers.2.enorm.weight": torch.ones(192)}
    change_tensors(latent_folder(tmp_path), lambda tensors: tensors.update(further))
    load_weights(tmp_path, from_hf(read_hf_config(tmp_path)), dtype=torch.bfloat16, device="cpu")


@pytest.mark.parametrize("native", OPERATIONS)
def test_blocks_of_8_bit_floats_compute_what_their_numbers_stand_for(native: bool, tmp_path: Path) -> None:
    """As DeepSeek publishes V3: every linear layer but routers and the head."""
    model = latent_model()
    model.save_pretrained(tmp_path)
    case, drawn, plain = CASES["fp8 blocks"], np.random.default_rng(7), dict[str, Tensor]()

    def quantise(tensors: Tensors) -> None:
        for tensor in [each for each in tensors if each.endswith(("_proj.weight", "_mqa.weight"))]:
            module, shape = tensor.removesuffix(".weight"), tensors.pop(tensor).shape
            parts, values = case.writer(module)(drawn, *shape)
            tensors.update({f"{module}.{part}": each for part, each in parts.items()})
            plain[tensor] = torch.from_numpy(values)

    change_tensors(tmp_path, quantise)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"quantization_config": dict(case.config)}))
    (tmp_path / "plain").mkdir()
    model.save_pretrained(tmp_path / "plain")
    change_tensors(tmp_path / "plain", lambda tensors: tensors.update(plain))
    dense = transformers.DeepseekV3ForCausalLM.from_pretrained(tmp_path / "plain", dtype=torch.float32).eval()
    ids = list(range(40))
    with torch.inference_mode():
        wanted = dense(torch.tensor([ids])).logits[0]
    spec = from_hf(read_hf_config(tmp_path))
    weights = load_weights(tmp_path, spec, dtype=torch.float32, device="cpu", keep_packed=True)
    formats = {name: matrix.format.name for name, matrix in weights.layers[1].mixer.matrices.items()}
    assert formats.pop("kv_b") == "float32" and set(formats.values()) == {"fp8-128x128"}
    tested = ModelUnderTest.make(spec, weights, torch.float32, capacity(96), native=native)
    (found,) = tested.logits([ids], 16)
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-4 * float(wanted.abs().max()))


@pytest.mark.parametrize("method", ["fp8", "int8", "int4"])
def test_the_matrix_that_is_split_is_not_quantised_while_loading(method: Any, tmp_path: Path) -> None:
    spec = from_hf(read_hf_config(latent_folder(tmp_path)))
    weights = load_weights(tmp_path, spec, dtype=torch.bfloat16, device="cpu", quantize=method)
    formats = {name: matrix.format.name for name, matrix in weights.layers[1].mixer.matrices.items()}
    assert formats.pop("kv_b") == "bfloat16" and "bfloat16" not in formats.values()


def test_a_quantised_copy_keeps_it_too_and_is_read_back(tmp_path: Path) -> None:
    latent_folder(tmp_path / "plain")
    quantise_folder(tmp_path / "plain", tmp_path / "small", "int8", watcher=Quiet())
    spec = from_hf(read_hf_config(tmp_path / "small"))
    described = describe_weights(tmp_path / "small", spec, dtype=torch.bfloat16, keep_packed=True)
    formats = {name: matrix.format.name for name, matrix in described.layers[1].mixer.matrices.items()}
    assert formats.pop("kv_b") == "bfloat16" and set(formats.values()) == {"int8"}
    (kept, plain) = (load_file(tmp_path / name / "model.safetensors") for name in ("small", "plain"))
    assert torch.equal(kept[f"{LAYER}kv_b_proj.weight"], plain[f"{LAYER}kv_b_proj.weight"])


class Quiet:
    def advance(self, doing: str, done: int, total: int) -> None: ...

    def note(self, line: str) -> None: ...


def test_what_an_engine_and_inspect_tell(tmp_path: Path) -> None:
    config = EngineConfig(model=latent_folder(tmp_path), device="cpu", kv_memory="1MiB")
    facts = inspect_model(config)
    assert facts.runs and facts.shape is not None
    assert (facts.shape.heads, facts.shape.head_size, facts.shape.experts) == (3, 48, 4)
    cpu = facts.devices[0]
    assert cpu.kv_bytes_per_token == 2 * ELEMENTS
    made = open_engine(config)
    made.runner.close()
    assert made.info.page_bytes == 16 * 2 * ELEMENTS
    assert cpu.pages == (1 << 20) // (16 * 2 * ELEMENTS)
    assert cpu.weights == made.info.weights


def test_pages_of_latent_vectors_are_swapped_and_given_back(tmp_path: Path) -> None:
    """Where pages run out choices go to host memory and back, and after a sleep the cache is made again."""
    latent_folder(tmp_path)
    prompts = [[(7 * row + at) % 96 for at in range(30)] for row in range(4)]
    params = SamplingParams(temperature=0, max_tokens=40)

    async def run(**options: Any) -> tuple[list[list[int]], Any]:
        found: list[list[int]] = [[]] * len(prompts)
        async with Engine(tmp_path, device="cpu", dtype="float32", page_size=4, **options) as engine:

            async def one(index: int) -> None:
                found[index] = (await engine.generate(prompts[index], params)).choices[0].token_ids

            async with anyio.create_task_group() as group:
                for index in range(len(prompts)):
                    group.start_soon(one, index)
            stats = engine.stats()
            await engine.sleep()
            await engine.wake()
            again = (await engine.generate(prompts[0], params)).choices[0].token_ids
            assert again == found[0]
        return found, stats

    page = 4 * 4 * ELEMENTS
    calm, stats = anyio.run(lambda: run(kv_memory=200 * page))
    assert not stats.preemptions
    tight, stats = anyio.run(lambda: run(kv_memory=40 * page, swap_memory=200 * page, max_context=100))
    assert tight == calm and stats.swaps


def test_other_caches_are_refused_by_name(tmp_path: Path) -> None:
    latent_folder(tmp_path)
    with pytest.raises(InvalidParams, match="kv_dtype"):
        open_engine(EngineConfig(model=tmp_path, device="cpu", kv_memory="1MiB", kv_dtype="fp8"))
    refused: dict[str, dict[str, Any]] = {
        "kv_dtype": {"kv_dtype": "fp8"},
        "decode_attention": {"decode_attention": "fa2"},
    }
    for field, options in refused.items():
        with emulated(), pytest.raises((InvalidParams, ModelRejected), match=field) as caught:
            open_engine(EngineConfig(model=tmp_path, device="cuda", kv_memory="1MiB", **options))
        assert caught.value.field == field


def test_other_models_have_no_latent_attention() -> None:
    with pytest.raises(ModelRejected, match="the mixer of a layer"):
        uniform_latents(from_hf(tiny_models.CONFIG))


def test_a_field_of_latent_attention_is_refused_elsewhere() -> None:
    with pytest.raises(ModelRejected, match="kv_lora_rank"):
        from_hf({**tiny_models.CONFIG, "kv_lora_rank": 64})


YARN = {
    "beta_fast": 32, "beta_slow": 1, "factor": 40, "mscale": 1.0, "mscale_all_dim": 1.0,
    "original_max_position_embeddings": 4096, "type": "yarn",
}  # fmt: skip
PUBLISHED: dict[str, dict[str, Any]] = {
    "DeepSeek-V3": {
        "architectures": ["DeepseekV3ForCausalLM"], "attention_bias": False,
        "auto_map": {"AutoConfig": "configuration_deepseek.DeepseekV3Config"}, "ep_size": 1,
        "first_k_dense_replace": 3, "hidden_act": "silu", "hidden_size": 7168, "intermediate_size": 18432,
        "kv_lora_rank": 512, "max_position_embeddings": 163840, "model_type": "deepseek_v3",
        "moe_intermediate_size": 2048, "moe_layer_freq": 1, "n_group": 8, "n_routed_experts": 256,
        "n_shared_experts": 1, "norm_topk_prob": True, "num_attention_heads": 128, "num_experts_per_tok": 8,
        "num_hidden_layers": 61, "num_key_value_heads": 128, "num_nextn_predict_layers": 1, "q_lora_rank": 1536,
        "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "rms_norm_eps": 1e-06, "rope_scaling": YARN,
        "rope_theta": 10000, "routed_scaling_factor": 2.5, "scoring_func": "sigmoid", "tie_word_embeddings": False,
        "topk_group": 4, "topk_method": "noaux_tc", "torch_dtype": "bfloat16", "v_head_dim": 128,
        "vocab_size": 129280,
    },
    "DeepSeek-V2-Lite": {
        "architectures": ["DeepseekV2ForCausalLM"], "attention_bias": False, "aux_loss_alpha": 0.001,
        "auto_map": {"AutoConfig": "configuration_deepseek.DeepseekV2Config"}, "first_k_dense_replace": 1,
        "hidden_act": "silu", "hidden_size": 2048, "intermediate_size": 10944, "kv_lora_rank": 512,
        "max_position_embeddings": 163840, "model_type": "deepseek_v2", "moe_intermediate_size": 1408,
        "moe_layer_freq": 1, "n_group": 1, "n_routed_experts": 64, "n_shared_experts": 2, "norm_topk_prob": False,
        "num_attention_heads": 16, "num_experts_per_tok": 6, "num_hidden_layers": 27, "num_key_value_heads": 16,
        "q_lora_rank": None, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "rms_norm_eps": 1e-06,
        "rope_scaling": YARN | {"mscale": 0.707, "mscale_all_dim": 0.707}, "rope_theta": 10000,
        "routed_scaling_factor": 1.0, "scoring_func": "softmax", "seq_aux": True, "tie_word_embeddings": False,
        "topk_group": 1, "topk_method": "greedy", "torch_dtype": "bfloat16", "v_head_dim": 128, "vocab_size": 102400,
    },
}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "layers", "all_dims", "rank"), [("DeepSeek-V3", 61, 1.0, 1536), ("DeepSeek-V2-Lite", 27, 0.707, None)]
)
def test_published_configs(name: str, layers: int, all_dims: float, rank: int | None) -> None:
    spec = from_hf(PUBLISHED[name])
    mixer = uniform_latents(spec)
    assert isinstance(mixer, LatentAttention) and mixer.query_latent_dim == rank
    assert mixer.state.elements == 576 and spec.cached_elements == 576 * layers and spec.max_context == 163840
    assert isinstance(spec.ropes[0].scaling, Yarn) and spec.ropes[0].magnitude == 1.0
    assert mixer.scale == pytest.approx((0.1 * all_dims * math.log(40) + 1) ** 2 / math.sqrt(192))
