"""Checkpoints with experts: how they are read in every format, what is refused by name, and what is told of them."""

from __future__ import annotations

import json
import re
import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

import anyio
import gguf
import numpy as np
import pytest
import torch
from adapter_folders import peft_model
from expert_models import CONFIG, expert_folder, expert_model
from gguf import GGMLQuantizationType as Kind
from gguf_models import encoded
from model_driver import ENGINE_OPS, OPERATIONS, ModelUnderTest, capacity
from quantised_checkpoints import CASES
from safetensors.torch import load_file, save_file
from torch import Tensor

from headrace.adapters.errors import AdapterRejected
from headrace.adapters.files import read_adapter
from headrace.engine import Engine, EngineConfig, InvalidParams, ModelRejected, SamplingParams
from headrace.engine.inspection.inspect import inspect_model
from headrace.engine.life.build import open_engine
from headrace.engine.model.checkpoint.gguf import GgufFile
from headrace.engine.model.checkpoint.weights import describe_weights, load_weights, open_weights
from headrace.engine.model.cpu.adapters import CpuBank
from headrace.engine.model.cpu.operations import cpu_ops
from headrace.engine.model.experts import ROUTER, gate_up_of, is_of_expert, routing_of
from headrace.engine.model.families.registry import from_hf, read_hf_config
from headrace.engine.model.network.decoder import Decoder
from headrace.engine.model.network.rotation import rotation_table
from headrace.engine.model.quantising.run import quantise_folder
from headrace.engine.model.shared.adapter_device import adapter_shape
from headrace.ops.cpu.block import CpuOps
from headrace.ops.cpu.native.library import Context
from headrace.ops.experts import Experts
from headrace.ops.routing import Routing

EXPERT = "model.layers.1.mlp.experts.3.up_proj.weight"
STACK = "model.layers.0.block_sparse_moe.input_linear.weight"
Tensors = dict[str, Tensor]


def change_tensors(folder: Path, change: Callable[[Tensors], object]) -> None:
    path = folder / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path)


def change_config(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def no_memory(_shape: Sequence[int], _dtype: torch.dtype) -> NoReturn:
    pytest.fail("a weight got memory")


def refused(folder: Path) -> ModelRejected:
    with pytest.raises(ModelRejected) as caught:
        load_weights(folder, from_hf(read_hf_config(folder)), dtype=torch.bfloat16, device="cpu", empty=no_memory)
    assert len(str(caught.value)) < 400
    return caught.value


def rename_to_stack(tensors: Tensors) -> None:
    """Stack the first layer's gates and ups, and leave each expert's, too."""
    prefix = "model.layers.0.mlp.experts"
    each = [[tensors[f"{prefix}.{expert}.{kind}_proj.weight"] for expert in range(8)] for kind in ("gate", "up")]
    tensors[f"{prefix}.gate_up_proj"] = torch.cat([torch.stack(matrices) for matrices in each], 1)


DAMAGE: dict[str, tuple[str, Callable[[Tensors], object], str, str]] = {
    "an expert is missing": ("Qwen3Moe", lambda t: t.pop(EXPERT), EXPERT, "missing.*the config has 8 experts"),
    "an expert too many": (
        "Qwen3Moe",
        lambda t: t.update({EXPERT.replace("3.up", "8.up"): t[EXPERT].clone()}),
        "model.layers.1.mlp.experts.8.up_proj.weight",
        "left over.*the config has 8 experts",
    ),
    "an expert of another shape": ("Qwen3Moe", lambda t: t.update({EXPERT: t[EXPERT][1:]}), EXPERT, r"\[32, 64\]"),
    "a router of another size": (
        "Qwen3Moe",
        lambda t: t.update({"model.layers.0.mlp.gate.weight": torch.ones(9, 64)}),
        "model.layers.0.mlp.gate.weight",
        r"\[8, 64\]",
    ),
    "both a stack and each": (
        "Qwen3Moe",
        rename_to_stack,
        "model.layers.0.mlp.experts.0.gate_proj.weight",
        "each expert's own tensors or model.layers.0.mlp.experts.gate_up_proj, not both",
    ),
    "a stack of fewer": ("GraniteMoe", lambda t: t.update({STACK: t[STACK][:5]}), STACK, "of 5 experts"),
    "a stack of more": (
        "GraniteMoe",
        lambda t: t.update({STACK: torch.cat([t[STACK]] * 2)}),
        STACK,
        "of 16 experts; wanted: 8, as the config says",
    ),
    "a stack of another width": ("GraniteMoe", lambda t: t.update({STACK: t[STACK][..., 1:]}), "", r"\[48, 64\]"),
    "a stack that is a matrix": ("GraniteMoe", lambda t: t.update({STACK: t[STACK][0]}), STACK, "2 \\* width"),
    "a stack of codes": (
        "GraniteMoe",
        lambda t: t.update({STACK: t[STACK].to(torch.float8_e4m3fn)}),
        STACK,
        "is float8_e4m3fn; wanted: plain floats; of quantised experts each has tensors of its own",
    ),
    "no shared expert": (
        "Qwen2Moe",
        lambda t: t.pop("model.layers.0.mlp.shared_expert_gate.weight"),
        "model.layers.0.mlp.shared_expert_gate.weight",
        "missing",
    ),
}


@pytest.mark.parametrize("case", DAMAGE)
def test_a_damaged_checkpoint_is_refused_before_it_has_memory(case: str, tmp_path: Path) -> None:
    family, change, field, told = DAMAGE[case]
    expert_folder(tmp_path, family)
    change_tensors(tmp_path, change)
    error = refused(tmp_path)
    assert field in (error.field or "")
    with pytest.raises(ModelRejected, match=told):
        raise error


def test_fields_of_published_configs_that_change_nothing(tmp_path: Path) -> None:
    """Qwen3-Coder's config has fields of its kin."""
    expert_folder(tmp_path, "Qwen3Moe")
    config = read_hf_config(tmp_path)
    coder = {"use_qk_norm": True, "qkv_bias": False, "shared_expert_intermediate_size": 0}
    assert from_hf(config | coder) == from_hf(config)


@pytest.mark.parametrize(
    ("family", "changes", "field", "told"),
    [
        ("Qwen3Moe", {"num_experts_per_tok": 9}, "num_experts_per_tok", "from 1 to 8"),
        ("Qwen3Moe", {"num_experts_per_tok": 0}, "num_experts_per_tok", "from 1 to 8"),
        ("Qwen3Moe", {"use_qk_norm": False}, "use_qk_norm", "true"),
        ("Qwen3Moe", {"num_experts": 4}, "num_local_experts", "4, as num_experts says"),
        ("Qwen3Moe", {"num_local_experts": 1 << 30}, "num_local_experts", "from 1 to 32768"),
        ("Qwen3Moe", {"num_local_experts": -8}, "num_local_experts", "from 1 to"),
        ("Qwen3Moe", {"num_local_experts": "8"}, "num_local_experts", "from 1 to"),
        ("Qwen3Moe", {"moe_intermediate_size": 1 << 40}, "moe_intermediate_size", "from 1 to"),
        ("Qwen3Moe", {"mlp_only_layers": [2]}, "mlp_only_layers", "from 0 to 1"),
        ("Qwen3Moe", {"mlp_only_layers": "0"}, "mlp_only_layers", "a list"),
        ("Qwen3Moe", {"decoder_sparse_step": 0}, "decoder_sparse_step", "from 1"),
        ("Qwen3Moe", {"hidden_act": "relu"}, "hidden_act", "silu"),
        ("Mixtral", {"hidden_act": "gelu"}, "hidden_act", "silu"),
        ("Mixtral", {"n_routed_experts": 8}, "n_routed_experts", "computed without it"),
        ("GraniteMoe", {"num_local_experts": None, "num_experts_per_tok": 9}, "num_experts_per_tok", "from 1 to 8"),
    ],
)
def test_a_config_that_asks_for_the_impossible_is_refused(
    family: str, changes: dict[str, Any], field: str, told: str, tmp_path: Path
) -> None:
    expert_folder(tmp_path, family)
    change_config(tmp_path, **changes)
    with pytest.raises(ModelRejected, match=told) as caught:
        from_hf(read_hf_config(tmp_path))
    assert caught.value.field == field


QUANTISED = {
    "fp8 blocks": {"modules_to_not_convert": ["lm_head", "mlp.gate", "shared_expert_gate"]},
    "compressed fp8 channels": {"ignore": ["lm_head", r"re:.*mlp\.gate$", r"re:.*shared_expert_gate$"]},
    "compressed int8 with zeros": {"ignore": ["lm_head", r"re:.*mlp\.gate$", r"re:.*shared_expert_gate$"]},
    "compressed int4 groups": {"ignore": ["lm_head", r"re:.*mlp\.gate$", r"re:.*shared_expert_gate$"]},
    "gptq v2 in an order": {},
    "awq": {"modules_to_not_convert": ["lm_head", "mlp.gate", "shared_expert_gate"]},
}
WIDE = {
    "hidden_size": 128, "moe_intermediate_size": 64, "shared_expert_intermediate_size": 64, "intermediate_size": 64
}  # fmt: skip


def quantised_folder(folder: Path, name: str) -> dict[str, Tensor]:
    """Write a model whose linear layers, but routers and the head, are stored as a tool does; return the plain ones."""
    expert_folder(folder, "Qwen2Moe", **WIDE)
    case, drawn, plain = CASES[name], np.random.default_rng(7), dict[str, Tensor]()

    def quantise(tensors: Tensors) -> None:
        for tensor in [each for each in tensors if each.endswith("_proj.weight")]:
            module, shape = tensor.removesuffix(".weight"), tensors.pop(tensor).shape
            parts, values = case.writer(module)(drawn, *shape)
            tensors.update({f"{module}.{part}": each for part, each in parts.items()})
            plain[tensor] = torch.from_numpy(values)

    change_tensors(folder, quantise)
    change_config(folder, quantization_config={**case.config, **QUANTISED[name]})
    return plain


@pytest.mark.parametrize("name", QUANTISED)
def test_quantised_experts_are_read_as_any_matrix(name: str, tmp_path: Path) -> None:
    plain = quantised_folder(tmp_path, name)
    spec = from_hf(read_hf_config(tmp_path))
    for keep_packed in (True, False):
        weights = load_weights(tmp_path, spec, dtype=torch.float32, device="cpu", keep_packed=keep_packed)
        for layer in range(2):
            feed = weights.layers[layer].feed
            assert feed.vectors[ROUTER].dtype == torch.float32
            for expert in range(8):
                prefix = f"model.layers.{layer}.mlp.experts.{expert}"
                wanted = torch.cat([plain[f"{prefix}.{kind}_proj.weight"] for kind in ("gate", "up")])
                stored = feed.matrices[gate_up_of(expert)]
                assert (stored.format.name != "float32") == keep_packed
                assert torch.equal(stored.dense(torch.float32), wanted)


def ignore(tensors: Tensors, plain: Tensors, config: dict[str, Any], *names: str) -> None:
    """Put plain numbers in the place of some modules' codes, and have the config say so."""
    for module in (f"{EXPERTS}.{name}" for name in names):
        for name in [name for name in tensors if name.startswith(f"{module}.")]:
            del tensors[name]
        tensors[f"{module}.weight"] = plain[f"{module}.weight"]
        config["ignore"].append(module)


EXPERTS = "model.layers.1.mlp.experts"
HALF: dict[str, tuple[str, Callable[[Tensors, Tensors, dict[str, Any]], object], str, str]] = {
    "codes that the config leaves out": (
        "compressed int4 groups",
        lambda t, plain, config: config["ignore"].append(f"{EXPERTS}.3.up_proj"),
        f"{EXPERTS}.3.up_proj.weight_packed",
        "leaves this module as it is",
    ),
    "half a product": (
        "compressed int4 groups",
        lambda t, plain, config: ignore(t, plain, config, "3.up_proj"),
        f"{EXPERTS}.3.up_proj.weight",
        "in plain numbers; wanted: as .*3.gate_proj.weight, which is int4-g64",
    ),
    "an expert's codes missing": (
        "awq",
        lambda t, plain, config: [t.pop(name) for name in list(t) if name.startswith(f"{EXPERTS}.7.")],
        f"{EXPERTS}.7.gate_proj.weight",
        "3 missing; the config has 8 experts",
    ),
    "a stack beside codes": (
        "gptq v2 in an order",
        lambda t, plain, config: t.update({f"{EXPERTS}.gate_up_proj": torch.ones(8, 128, 128)}),
        f"{EXPERTS}.0.gate_proj.qweight",
        "either each expert's own tensors or .*gate_up_proj, not both",
    ),
    "a router in codes": (
        "compressed int8 with zeros",
        lambda t, plain, config: t.update({"model.layers.1.mlp.gate.weight": torch.ones(8, 128, dtype=torch.int8)}),
        "model.layers.1.mlp.gate.weight",
        "is int8; wanted: floats",
    ),
}


@pytest.mark.parametrize("case", HALF)
def test_experts_that_are_quantised_by_half_are_refused(case: str, tmp_path: Path) -> None:
    name, change, field, told = HALF[case]
    plain, config = quantised_folder(tmp_path, name), json.loads((tmp_path / "config.json").read_text())
    change_tensors(tmp_path, lambda tensors: change(tensors, plain, config["quantization_config"]))
    (tmp_path / "config.json").write_text(json.dumps(config))
    error = refused(tmp_path)
    assert error.field == field and re.search(told, str(error))


def test_experts_may_be_plain_beside_others_in_codes(tmp_path: Path) -> None:
    plain, config = quantised_folder(tmp_path, "compressed int4 groups"), read_hf_config(tmp_path)
    names = [f"3.{kind}_proj" for kind in ("gate", "up", "down")]
    change_tensors(tmp_path, lambda tensors: ignore(tensors, plain, config["quantization_config"], *names))
    change_config(tmp_path, quantization_config=config["quantization_config"])
    spec = from_hf(read_hf_config(tmp_path))
    weights = load_weights(tmp_path, spec, dtype=torch.float32, device="cpu", keep_packed=True)
    matrices = weights.layers[1].feed.matrices
    assert [matrices[f"down_{expert}"].format.name for expert in (2, 3)] == ["int4-g64", "float32"]
    assert torch.equal(matrices["down_3"].dense(torch.float32), plain[f"{EXPERTS}.3.down_proj.weight"])


@pytest.mark.parametrize("method", ["fp8", "int8", "int4"])
def test_experts_are_quantised_while_loading_and_routers_never(method: Any, tmp_path: Path) -> None:
    expert_folder(tmp_path, "Qwen2Moe", **WIDE)
    spec = from_hf(read_hf_config(tmp_path))
    weights = load_weights(tmp_path, spec, dtype=torch.bfloat16, device="cpu", quantize=method)
    tensors = load_file(tmp_path / "model.safetensors")
    feed = weights.layers[1].feed
    assert all("bfloat16" not in matrix.format.name for matrix in feed.matrices.values())
    assert sum(map(is_of_expert, feed.matrices)) == 16 and len(feed.matrices) == 18
    assert torch.equal(feed.vectors[ROUTER], tensors["model.layers.1.mlp.gate.weight"])
    assert torch.equal(feed.vectors["shared_switch_1E"], tensors["model.layers.1.mlp.shared_expert_gate.weight"])


@pytest.mark.parametrize("native", OPERATIONS)
def test_quantised_experts_compute_what_their_numbers_stand_for(native: bool, tmp_path: Path) -> None:
    plain = quantised_folder(tmp_path, "compressed int8 with zeros")
    model = expert_model("Qwen2Moe", **WIDE)
    model.save_pretrained(tmp_path / "plain")
    change_tensors(tmp_path / "plain", lambda tensors: tensors.update(plain))
    ids = list(range(20))
    _, wanted = ModelUnderTest.load(tmp_path / "plain")
    spec = from_hf(read_hf_config(tmp_path))
    weights = load_weights(tmp_path, spec, dtype=torch.float32, device="cpu", keep_packed=True)
    tested = ModelUnderTest.make(spec, weights, torch.float32, capacity(96), native=native)
    (found,), (expected,) = tested.logits([ids], 128), wanted.logits([ids], 128)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-4 * float(expected.abs().max()))


def test_a_layer_is_packed_before_the_next_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A model's many experts are in memory once, but for those of one layer."""
    expert_folder(tmp_path, num_hidden_layers=4)
    spec, read = from_hf(read_hf_config(tmp_path)), list[weakref.ref[Tensor]]()
    pack_experts, alive = ENGINE_OPS.pack_experts, list[int]()

    def counted(self: CpuOps, experts: Experts) -> Any:
        alive.append(sum(tensor() is not None for tensor in read))
        read.extend(weakref.ref(weight.parts["values"]) for weight in (*experts.gate_up, *experts.down))
        return pack_experts(self, experts)

    monkeypatch.setattr(ENGINE_OPS, "pack_experts", counted)
    context = None if ENGINE_OPS is CpuOps else Context(1)
    ops = cpu_ops(spec, page_size=4, max_positions=64, dtype=torch.float32, context=context)
    with open_weights(tmp_path, spec, dtype=torch.float32) as weights:
        Decoder(spec, weights, ops)
    assert alive == [0] * 4 and len(read) == 4 * 16


def test_what_an_engine_and_inspect_tell_of_experts(tmp_path: Path) -> None:
    expert_folder(tmp_path, "Qwen2Moe")
    facts = inspect_model(EngineConfig(model=tmp_path))
    assert facts.runs and facts.shape is not None
    assert (facts.shape.experts, facts.shape.experts_per_token) == (8, 3)
    experts = 2 * 8 * 3 * 32 * 64 * 4
    assert {part.part: part.nbytes for part in facts.stored}["experts"] == experts
    assert facts.stored_bytes - facts.active_bytes == experts * 5 // 8
    made = open_engine(EngineConfig(model=tmp_path, device="cpu", dtype="float32", kv_memory="1MiB"))
    made.runner.close()
    assert (made.info.experts, made.info.experts_per_token) == (8, 3)
    assert {part.part: part.nbytes for part in made.info.weights}["experts"] == experts
    assert made.info.weight_bytes - made.info.active_weight_bytes == experts * 5 // 8
    assert facts.devices[0].weights == open_cpu_weights(tmp_path)


def open_cpu_weights(folder: Path) -> Any:
    made = open_engine(EngineConfig(model=folder, device="cpu"))
    made.runner.close()
    return made.info.weights


ATTENTION = "q_proj|k_proj|v_proj|o_proj|lm_head|embed_tokens"
WORN: dict[str, tuple[str, dict[str, Any], str]] = {
    "Qwen3Moe": ("Qwen3Moe", {}, ATTENTION),
    "Qwen3Moe, dense at first": ("Qwen3Moe", {"mlp_only_layers": [0]}, rf"{ATTENTION}|layers\.0\.mlp\.\w+_proj"),
    "Mixtral": ("Mixtral", {}, ATTENTION),
    "GptOss": ("GptOss", {}, ATTENTION),
    "Qwen2Moe": ("Qwen2Moe", {}, rf"{ATTENTION}|shared_expert\.\w+_proj"),
    "Qwen2Moe, dense at last": (
        "Qwen2Moe",
        {"mlp_only_layers": [1]},
        r"q_proj|layers\.1\.mlp\.(gate|down)_proj|shared_expert\.(up|down)_proj",
    ),
    "GraniteMoeShared": ("GraniteMoeShared", {}, rf"{ATTENTION}|shared_mlp\.\w+_linear"),
}
"""Family, changes of its config, and the ends of the names of the modules that an adapter updates."""


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("native", OPERATIONS)
@pytest.mark.parametrize("kind", WORN)
def test_an_adapter_of_all_but_experts_gives_what_peft_gives(kind: str, native: bool, tmp_path: Path) -> None:
    family, changes, ends = WORN[kind]
    if native and family == "GptOss":
        pytest.skip("a variant of attention, which torch's operations compute")
    base = expert_model(family, **changes)
    base.save_pretrained(tmp_path / "base")
    model = peft_model(base, r=6, target_modules=rf"(.*\.)?({ends})")
    model.save_pretrained(tmp_path / "adapter")
    spec, tested = ModelUnderTest.load(tmp_path / "base", native=native)
    tested.bank = CpuBank(2, 8, torch.float32)
    tested.bank.put(0, 0, read_adapter(tmp_path / "adapter", adapter_shape(spec), torch.float32, max_rank=8))
    ids = list(range(30))
    with torch.inference_mode():
        wanted = model(torch.tensor([ids])).logits[0]
    plain, worn = tested.logits([ids, ids], 128, slots=[-1, 0])
    torch.testing.assert_close(worn, wanted, rtol=0, atol=1e-4)
    assert (plain - worn).abs().max() > 0.1


@pytest.mark.parametrize(
    ("layer", "module"),
    [
        (1, "mlp.experts.3.gate_proj"),
        (1, "mlp.gate"),
        (1, "mlp.shared_expert_gate"),
        (1, "mlp.gate_proj"),  # which layer 0 has
        (0, "mlp.shared_expert.up_proj"),  # which layer 1 has
    ],
)
def test_an_adapter_of_an_expert_is_refused_by_the_name_of_its_tensor(layer: int, module: str, tmp_path: Path) -> None:
    kind = {"architectures": ["Qwen2MoeForCausalLM"], "num_experts": 8, "mlp_only_layers": [0]}
    shape = adapter_shape(from_hf({**CONFIG, **kind}))
    name = f"base_model.model.model.layers.{layer}.{module}"
    tensors = {f"{name}.lora_A.weight": torch.ones(4, 64), f"{name}.lora_B.weight": torch.ones(48, 4)}
    tmp_path.joinpath("adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": 4}))
    save_file(tensors, tmp_path / "adapter_model.safetensors")
    with pytest.raises(AdapterRejected, match="since experts and their routers take none") as caught:
        read_adapter(tmp_path, shape, torch.float32, max_rank=8, take=no_pieces)
    assert module in str(caught.value)


@pytest.mark.parametrize("names", ["mlp.shared_expert", "mlp.shared_experts"])
def test_a_model_from_a_gguf_file_takes_the_names_that_peft_gives_to_shared_experts(names: str) -> None:
    spec = from_hf({**CONFIG, "architectures": ["Qwen2MoeForCausalLM"], "num_experts": 8})
    shape = adapter_shape(replace(spec, names=replace(spec.names, is_peft=False)))
    for module in ("gate", "up", "down"):
        key = f"base_model.model.model.layers.1.{names}.{module}_proj.lora_B.weight"
        assert shape.names.place(key) == (1, f"shared_{module}", "B")


def no_pieces(*_given: Any) -> NoReturn:
    pytest.fail("weights were read")


def test_an_engine_tells_the_logprobs_of_a_prompt(tmp_path: Path) -> None:
    model = expert_model("Mixtral")
    expert_folder(tmp_path, "Mixtral")
    prompt = list(range(12))

    async def run() -> list[float]:
        async with Engine(tmp_path, dtype="float32", kv_memory="1MiB") as engine:
            params = SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=1)
            told = (await engine.generate(prompt, params)).prompt_logprobs
            assert told is not None
            return [each.logprob for each in told if each is not None]

    with torch.inference_mode():
        wanted = torch.log_softmax(model(torch.tensor([prompt])).logits[0], -1)[range(11), prompt[1:]]
    assert anyio.run(run) == pytest.approx(wanted.tolist(), abs=1e-3)


def test_quantising_a_folder_keeps_routers_and_is_read_back(tmp_path: Path) -> None:
    expert_folder(tmp_path / "plain", "Qwen2Moe", **WIDE)
    quantise_folder(tmp_path / "plain", tmp_path / "small", "int8", watcher=Quiet())
    spec = from_hf(read_hf_config(tmp_path / "small"))
    described = describe_weights(tmp_path / "small", spec, dtype=torch.bfloat16, keep_packed=True)
    formats = {matrix.format.name for matrix in described.layers[1].feed.matrices.values()}
    assert formats == {"int8"}
    kept = load_file(tmp_path / "small" / "model.safetensors")["model.layers.0.mlp.gate.weight"]
    assert torch.equal(kept, load_file(tmp_path / "plain" / "model.safetensors")["model.layers.0.mlp.gate.weight"])


class Quiet:
    def advance(self, doing: str, done: int, total: int) -> None: ...

    def note(self, line: str) -> None: ...


@pytest.mark.parametrize(
    ("family", "ids_ST", "told"),
    [("GraniteMoe", None, "each expert's own tensors"), ("Qwen3Moe", torch.ones(8, 64).long(), "leave the data out")],
)
def test_what_quantising_a_folder_does_not_do_is_refused(
    family: str, ids_ST: Tensor | None, told: str, tmp_path: Path
) -> None:
    expert_folder(tmp_path / "plain", family)
    with pytest.raises(InvalidParams, match=told):
        quantise_folder(tmp_path / "plain", tmp_path / "small", "int8", watcher=Quiet(), data=ids_ST)
    assert not (tmp_path / "small").exists()


ROLES = {
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output", "self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm",
    "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm", "mlp.gate": "ffn_gate_inp",
}  # fmt: skip
TOP = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}


def gguf_tensors(tensors: Tensors) -> Tensors:
    """The tensors of a Qwen3-MoE checkpoint as a GGUF file names and stacks them."""
    found = {f"{name}.weight": tensors[f"{hf}.weight"] for hf, name in TOP.items()}
    for layer in range(2):
        prefix = f"model.layers.{layer}."
        found |= {f"blk.{layer}.{name}.weight": tensors[f"{prefix}{hf}.weight"] for hf, name in ROLES.items()}
        for kind in ("gate", "up", "down"):
            each = [tensors[f"{prefix}mlp.experts.{expert}.{kind}_proj.weight"] for expert in range(8)]
            found[f"blk.{layer}.ffn_{kind}_exps.weight"] = torch.stack(each)
    return found


def write_gguf(path: Path, tensors: Tensors, kind: Kind, count: int = 8) -> Tensors:
    """Write a file whose matrices but routers are of `kind`; return what the gguf package reads from it."""
    drawn, found = np.random.default_rng(3), dict[str, Tensor]()
    writer = gguf.GGUFWriter(path, "qwen3moe")
    writer.add_block_count(2)
    writer.add_context_length(256)
    writer.add_embedding_length(256)
    writer.add_feed_forward_length(48)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    writer.add_expert_count(count)
    writer.add_expert_used_count(3)
    writer.add_expert_feed_forward_length(256)
    for name, tensor in tensors.items():
        raw_kind = kind if tensor.ndim > 1 and "gate_inp" not in name else Kind.F32
        matrix = tensor.float().numpy().reshape(-1, tensor.shape[-1])
        raw = encoded(matrix, raw_kind, drawn)
        found[name] = torch.from_numpy(gguf.quants.dequantize(raw, raw_kind)).reshape(tensor.shape)
        writer.add_tensor(name, raw.reshape(*tensor.shape[:-1], -1), raw_dtype=raw_kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return found


GGUF_SIZES = {"hidden_size": 256, "moe_intermediate_size": 256, "head_dim": 64}


@pytest.mark.parametrize("kind", [Kind.F16, Kind.Q8_0, Kind.Q4_K, Kind.Q6_K], ids=lambda kind: kind.name)
def test_a_gguf_file_with_experts(kind: Kind, tmp_path: Path) -> None:
    model = expert_model("Qwen3Moe", **GGUF_SIZES)
    for parameter in model.parameters():
        parameter.data = parameter.data.half().float()
    tensors = gguf_tensors(saved(model, tmp_path))
    numbers = write_gguf(tmp_path / "tiny.gguf", tensors, kind)
    with GgufFile(tmp_path / "tiny.gguf") as file:
        spec = file.spec()
        weights = load_weights(file, spec, dtype=torch.float32, device="cpu", keep_packed=True)
    for layer in range(2):
        for expert in range(8):
            matrices = weights.layers[layer].feed.matrices
            rows = [numbers[f"blk.{layer}.ffn_{each}_exps.weight"][expert] for each in ("gate", "up")]
            assert torch.equal(matrices[gate_up_of(expert)].dense(torch.float32), torch.cat(rows))
            assert (matrices[gate_up_of(expert)].format.name == "float32") == (kind is Kind.F16)
    if kind is Kind.F16:
        tested = ModelUnderTest.open_gguf(tmp_path / "tiny.gguf", torch.float32, keep_packed=False)
        with torch.inference_mode():
            wanted = model(torch.tensor([list(range(20))])).logits[0]
        (found,) = tested.logits([list(range(20))], 128)
        torch.testing.assert_close(found, wanted, rtol=0, atol=1e-4 * float(wanted.abs().max()))


def saved(model: Any, folder: Path) -> Tensors:
    model.save_pretrained(folder)
    return load_file(folder / "model.safetensors")


@pytest.mark.parametrize(
    ("count", "change", "told"),
    [
        (4, lambda t: None, r"ffn_gate_inp.weight is \[8, 256\]; wanted: the shape \[4, 256\]"),
        (9, lambda t: None, "of 8 experts; wanted: more than 8"),
        (8, lambda t: t.pop("blk.1.ffn_up_exps.weight"), "blk.1.ffn_up_exps.0.weight is missing"),
        (8, lambda t: t.update({"blk.1.ffn_up_exps.weight": torch.ones(8, 256)}), r"\[experts, out, in\]"),
    ],
)
def test_a_gguf_file_whose_experts_disagree_is_refused(count: int, change: Any, told: str, tmp_path: Path) -> None:
    tensors = gguf_tensors(saved(expert_model("Qwen3Moe", **GGUF_SIZES), tmp_path))
    change(tensors)
    write_gguf(tmp_path / "tiny.gguf", tensors, Kind.Q8_0, count)
    with GgufFile(tmp_path / "tiny.gguf") as file, pytest.raises(ModelRejected, match=told):
        load_weights(file, file.spec(), dtype=torch.float32, device="cpu", empty=no_memory)


PHI_MOE = {
    "architectures": ["PhimoeForCausalLM"],
    "model_type": "phimoe",
    "vocab_size": 32064,
    "hidden_size": 4096,
    "intermediate_size": 6400,
    "num_hidden_layers": 2,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "num_local_experts": 16,
    "num_experts_per_tok": 2,
    "attention_bias": True,
    "lm_head_bias": True,
    "max_position_embeddings": 131072,
    "original_max_position_embeddings": 4096,
    "sliding_window": 131072,
    "router_jitter_noise": 0.01,
    "input_jitter_noise": 0.01,
    "rope_theta": 10000.0,
    "rope_scaling": {
        "type": "longrope",
        "short_factor": [1.0 + 0.01 * pair for pair in range(64)],
        "long_factor": [1.0 + 0.5 * pair for pair in range(64)],
        "short_mscale": 1.243163121016122,
        "long_mscale": 1.25,
        "original_max_position_embeddings": 4096,
    },
}
"""As Microsoft publishes Phi-3.5-MoE, with fewer layers, simpler divisors and a long magnitude of its own."""


@pytest.mark.parametrize(("context", "key", "magnitude"), [(4096, "short", 1.243163121016122), (4097, "long", 1.25)])
def test_phi_takes_divisors_and_magnitude_by_the_longest_context(context: int, key: str, magnitude: float) -> None:
    spec = from_hf(PHI_MOE)
    assert spec.windows == (None, None) and spec.head_bias and spec.max_context == 131072
    routing = routing_of(spec)
    assert routing == Routing(16, 2, "sparsemixer", margin=0.02)
    scaling = PHI_MOE["rope_scaling"]
    assert isinstance(scaling, dict)
    divisors = np.array(scaling[f"{key}_factor"])
    angles = np.outer(np.arange(64), 10000.0 ** (-np.arange(64) / 64) / divisors)
    cos, sin = rotation_table(spec.ropes[0], spec.uniform_attention, 64, torch.device("cpu"), context=context)
    np.testing.assert_allclose(cos.numpy(), np.cos(angles) * magnitude, rtol=0, atol=2e-5)
    np.testing.assert_allclose(sin.numpy(), np.sin(angles) * magnitude, rtol=0, atol=2e-5)


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"num_experts_per_tok": 3}, "num_experts_per_tok"),
        ({"router_jitter_noise": -1}, "router_jitter_noise"),
        ({"rope_scaling": {**PHI_MOE["rope_scaling"], "long_mscale": None}}, "long_mscale"),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, "type"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"lm_head_bias": 1}, "lm_head_bias"),
    ],
)  # fmt: skip
def test_what_phi_does_not_compute_is_refused(changes: dict[str, Any], field: str) -> None:
    with pytest.raises(ModelRejected) as caught:
        from_hf(PHI_MOE | changes)
    assert caught.value.field == field
