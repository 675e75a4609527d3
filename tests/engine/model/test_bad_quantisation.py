"""Damaged quantised checkpoints: one typed error that names the tensor or field, before any weight has memory."""

from __future__ import annotations

import gc
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch
from quantised_checkpoints import CASES, write_checkpoint
from safetensors.torch import load_file, save_file
from torch import Tensor

from headrace.engine import EngineConfig, ModelRejected
from headrace.engine.life.build import open_engine
from headrace.engine.model.checkpoint.weights import load_weights
from headrace.engine.model.families.registry import from_hf, read_hf_config

Q, K = "model.layers.0.self_attn.q_proj.", "model.layers.0.self_attn.k_proj."
DOWN = "model.layers.1.mlp.down_proj."
EMBEDDING, CACHE = "model.embed_tokens.weight", "model.layers.0.self_attn.k_scale"
Tensors = dict[str, Tensor]


def no_memory(_shape: Sequence[int], _dtype: torch.dtype) -> NoReturn:
    pytest.fail("a weight got memory")


def refused(folder: Path, empty: Any = no_memory) -> ModelRejected:
    with pytest.raises(ModelRejected) as caught:
        spec = from_hf(read_hf_config(folder))
        load_weights(folder, spec, dtype=torch.bfloat16, device="cpu", keep_packed=True, empty=empty)
    assert len(str(caught.value)) < 700
    return caught.value


def change_config(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    path = folder / "config.json"
    config = json.loads(path.read_text())
    change(config["quantization_config"])
    path.write_text(json.dumps(config))


def change_tensors(folder: Path, change: Callable[[Tensors], object]) -> None:
    path = folder / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path)


def weights(config: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = config["config_groups"]["group_0"]["weights"]
    return found


CT4, CT4Z, ORDER = "compressed int4 groups", "compressed int4 groups with zeros", "compressed int4 in an order"
LEFT = "since the quantization_config leaves this module as it is"
CONFIGS: list[tuple[str, Callable[[dict[str, Any]], object], str, str]] = [
    (CT4, lambda c: c.update(quant_method="quip"), "quant_method", "gptq, awq, auto-round"),
    (CT4, lambda c: c.update(quant_method=["awq"]), "quant_method", "fp8"),
    (CT4, lambda c: c.update(format="marlin-24"), "format", "pack-quantized"),
    (CT4, lambda c: c.update(config_groups={}), "config_groups", "groups of modules"),
    (CT4, lambda c: c.update(config_groups=[]), "config_groups", "an object"),
    (
        CT4,
        lambda c: c["config_groups"]["group_0"].update(targets=["re:.*experts.*"]),
        "targets",
        "has none of these",
    ),
    (CT4, lambda c: c["config_groups"]["group_0"].update(targets=["re:(a"]), "targets", "regular expressions"),
    (CT4, lambda c: c["config_groups"]["group_0"].update(targets=["re:(?!a).*"]), "targets", "look-around"),
    (CT4, lambda c: c["config_groups"]["group_0"].update(targets="Linear"), "targets", "a list of strings"),
    (CT4, lambda c: weights(c).update(num_bits=3), "num_bits", "4, 8"),
    (CT4, lambda c: weights(c).update(type="ternary"), "type", "int, float"),
    (CT4, lambda c: weights(c).update(strategy="token"), "strategy", "group, channel, tensor"),
    (CT4, lambda c: weights(c).update(group_size="64"), "group_size", "an integer"),
    (CT4, lambda c: c.update(kv_cache_scheme={"num_bits": 8, "type": "int"}), "kv_cache_scheme", "8-bit floats"),
    (CT4, lambda c: c.update(transform_config={"config_groups": {"u": {}}}), "transform_config", "none"),
    (CT4, lambda c: weights(c).update(group_size=128), Q + "weight_packed", "whole groups of 128"),
    ("compressed fp8 blocks", lambda c: weights(c).update(block_structure=None), "block_structure", "a block"),
    ("compressed mxfp4", lambda c: weights(c).update(group_size=64), "group_size", "32 (MXFP4)"),
    ("fp8 blocks", lambda c: c.update(weight_block_size=[128]), "weight_block_size", "two sizes"),
    ("fp8 blocks", lambda c: c.update(weight_block_size=[0, 128]), "weight_block_size", "two sizes"),
    ("fp8 blocks", lambda c: c.update(fmt="e5m2"), "fmt", "e4m3"),
    (
        "modelopt nvfp4",
        lambda c: c.update(quant_algo="W4A8_AWQ"),
        "quant_algo",
        "FP8, FP8_PER_CHANNEL_PER_TOKEN, FP8_PB_WO, FP8_PB, NVFP4, MIXED_PRECISION",
    ),
    ("modelopt nvfp4", lambda c: c.update(quant_algo=["FP8_PB_WO"]), "quant_algo", "FP8_PB_WO"),
    (
        "modelopt mixture",
        lambda c: c["quantized_layers"][DOWN[:-1]].update(quant_algo="fp8_pb_w8"),
        "quant_algo",
        "FP8_PB_WO, FP8_PB",
    ),
    ("modelopt mixture", lambda c: c["quantized_layers"].pop(Q[:-1]), Q + "weight", LEFT),
    # Blocks of 128 where a tensor has one scale.
    (
        "modelopt mixture",
        lambda c: c["quantized_layers"][DOWN[:-1]].update(quant_algo="FP8_PB"),
        DOWN + "weight_scale",
        "[2, 1, 3, 1]",
    ),
    ("modelopt nvfp4", lambda c: c.update(kv_cache_quant_algo="NVFP4"), "kv_cache_quant_algo", "FP8"),
    ("gptq", lambda c: c.update(bits=3), "bits", "4, 8"),
    ("gptq", lambda c: c.update(bits=2), "bits", "4, 8"),
    ("gptq", lambda c: c.update(checkpoint_format="marlin"), "checkpoint_format", "gptq, gptq_v2"),
    ("gptq", lambda c: c.update(dynamic={"+:.*": {"bits": 3}}), "bits", "4, 8"),
    ("gptq", lambda c: c.update(sym="yes"), "sym", "true or false"),
    ("gptq", lambda c: c.update(dynamic={f"-:{at}": {} for at in range(1025)}), "dynamic", "at most 1024"),
    (CT4, lambda c: c["ignore"].extend(f"re:{at}" for at in range(1025)), "ignore", "at most 1024"),
    ("awq", lambda c: c.update(version="gemv"), "version", "gemm"),
    ("awq", lambda c: c.update(checkpoint_format="gemv_fast"), "checkpoint_format", "gemm"),
    ("awq", lambda c: c.update(bits=8), "bits", "4"),
    ("auto-round", lambda c: c.update(bits=2), "bits", "4, 8, 16"),
    ("auto-round", lambda c: c.update(packing_format="auto_round:mlx"), "packing_format", "auto_round:auto_gptq"),
    ("auto-round", lambda c: c.update(data_type="nf4"), "data_type", "mx_fp"),
    ("awq", lambda c: c.update(group_size=128), Q + "qweight", "whole groups of 128"),
    ("gptq", lambda c: c.update(group_size=100), Q + "scales", "[2, 192] beside " + Q + "qweight [24, 192]"),
    ("gptq", lambda c: c.update(group_size=0), "group_size", "an integer from 1"),
    ("gptq", lambda c: c.pop("bits"), "bits", "4, 8"),
    ("modelopt nvfp4", lambda c: c.update(quant_algo="MIXED_PRECISION"), Q + "weight", LEFT),
    ("auto-round", lambda c: c.update(block_name_to_quantize="model.blocks"), Q + "qweight", LEFT),
    ("compressed int8", lambda c: c["config_groups"]["group_0"].update(targets=["Conv2d"]), "targets", "none of these"),
    # Entries that say how modules are stored, and name none.
    ("gptq", lambda c: c.update(dynamic={"+:.*o_prj": {"bits": 8}}), "dynamic", "'+:.*o_prj' names none"),
    ("gptq", lambda c: c.update(dynamic={r"model\.layers\.1\.mpl": {}}), "dynamic", "names none"),
    ("auto-round", lambda c: c.update(extra_config={"layers.0.o_proj": {"bits": 8}}), "extra_config", "names none"),
    ("auto-round", lambda c: c.update(extra_config={".*o_prj": {"bits": 8}}), "extra_config", "'.*o_prj' names none"),
    (
        CT4,
        lambda c: c["config_groups"]["group_0"]["targets"].append("re:.*o_prj"),
        "targets",
        "'re:.*o_prj' names none",
    ),
    (CT4, lambda c: c["config_groups"]["group_0"]["targets"].append("o_proj"), "targets", "'o_proj' names none"),
    # Half of a product that is computed at once.
    (CT4, lambda c: c["ignore"].append(Q.rstrip(".")), Q + "weight_packed", LEFT),
    (
        "compressed int8",
        lambda c: c["config_groups"]["group_0"].update(targets=["re:.*q_proj"]),
        K + "weight",
        LEFT,
    ),
    ("fp8 blocks", lambda c: c.update(ignored_layers=["q_proj"]), Q + "weight", LEFT),
    ("modelopt nvfp4", lambda c: c["ignore"].append("*q_proj"), Q + "weight", LEFT),
    ("gptq", lambda c: c.update(dynamic={"-:.*q_proj": {}}), Q + "qweight", LEFT),
    ("awq", lambda c: c.update(modules_to_not_convert=["q_proj"]), Q + "qweight", LEFT),
    ("auto-round", lambda c: c.update(extra_config={Q.rstrip("."): {"bits": 16}}), Q + "qweight", LEFT),
    ("mxfp4", lambda c: c["modules_to_not_convert"].append("q_proj"), Q + "weight_blocks", LEFT),
    ("bitsandbytes nf4", lambda c: c["llm_int8_skip_modules"].append("q_proj"), Q + "weight", LEFT),
]


UNREAD = ("visual.blocks.0.attn", "mtp.layers.0", "model.layers.2.mlp", r"model.layers.61.eh_proj", "lm_head.none")


@pytest.mark.parametrize("name", UNREAD)
@pytest.mark.parametrize("case", ["gptq", "auto-round", CT4])
def test_entries_may_name_what_is_never_read_and_what_is_left_as_it_is(case: str, name: str, tmp_path: Path) -> None:
    """The last name could only be one of the text model's, so that it has to stand among what is left as it is."""
    field = {"gptq": "dynamic", "auto-round": "extra_config", CT4: "config_groups"}[case]
    is_free = name == UNREAD[-1]

    def change(config: dict[str, Any]) -> None:
        if case == CT4:
            (config["ignore"] if is_free else config["config_groups"]["group_0"]["targets"]).append(name)
        elif case == "gptq":
            config[field] = {("-:" if is_free else "+:") + name: {"bits": 8}}
        else:
            config[field] = {name: {"bits": 16 if is_free else 8}}

    write_checkpoint(tmp_path, CASES[case])
    change_config(tmp_path, change)
    spec = from_hf(read_hf_config(tmp_path))
    load_weights(tmp_path, spec, dtype=torch.bfloat16, device="cpu", keep_packed=True)


@pytest.mark.parametrize(("case", "change", "field", "limit"), CONFIGS)
def test_a_config_that_is_not_read_is_refused_by_its_field(
    case: str, change: Callable[[dict[str, Any]], object], field: str, limit: str, tmp_path: Path
) -> None:
    write_checkpoint(tmp_path, CASES[case])
    change_config(tmp_path, change)
    error = refused(tmp_path)
    assert error.field == field and limit in str(error)


def put(name: str, at: tuple[int, ...], value: float) -> Callable[[Tensors], object]:
    def change(tensors: Tensors) -> None:
        raw = tensors[name]
        (raw.view(torch.uint8) if raw.dtype.itemsize == 1 else raw)[at] = value

    return change


def swap(name: str, make: Callable[[Tensor], Tensor]) -> Callable[[Tensors], object]:
    return lambda tensors: tensors.update({name: make(tensors[name])})


def drop(name: str) -> Callable[[Tensors], object]:
    return lambda tensors: tensors.pop(name)


def plain_q(tensors: Tensors) -> None:
    for name in [name for name in tensors if name.startswith(Q)]:
        del tensors[name]
    tensors[Q + "weight"] = torch.zeros(192, 192, dtype=torch.bfloat16)


NAN, INF = float("nan"), float("inf")
SCALE, INVERSE, WORDS, ZERO = (
    Q + name for name in ("weight_scale", "weight_scale_inv", "weight_packed", "weight_zero_point")
)
TENSORS: list[tuple[str, Callable[[Tensors], object], str, str]] = [
    ("fp8 blocks", drop(INVERSE), INVERSE, "missing"),
    ("fp8 blocks", lambda t: t.update({SCALE: torch.ones(192, 1)}), INVERSE, "there beside another"),
    ("fp8 blocks", lambda t: t.update({Q + "weight_scale_3": torch.ones(1)}), Q + "weight_scale_3", "left over"),
    ("fp8 blocks", swap(INVERSE, lambda s: s[:1]), INVERSE, "[2, 2]"),
    ("fp8 blocks", swap(INVERSE, lambda s: s.int()), INVERSE, "int32 [2, 2]"),
    ("fp8 blocks", swap(Q + "weight", lambda w: w.view(torch.int8)), Q + "weight", "wanted: float8_e4m3fn"),
    ("fp8 blocks", put(INVERSE, (1, 0), NAN), INVERSE, "nan at [1, 0]"),
    ("fp8 blocks", put(INVERSE, (0, 1), INF), INVERSE, "inf at [0, 1]"),
    ("fp8 blocks", put(INVERSE, (0, 1), 0.0), INVERSE, "0.0 at [0, 1]"),
    ("modelopt fp8 blocks", drop(SCALE), INVERSE, "one tensor of scales"),
    ("modelopt fp8 blocks", swap(SCALE, lambda s: s[:, :, :1]), SCALE, "[2, 1, 2, 1]"),
    ("modelopt fp8 blocks", swap(SCALE, lambda s: s.view(2, 2, 1, 1)), SCALE, "[2, 1, 2, 1]"),
    ("modelopt fp8 blocks", put(SCALE, (1, 0, 0, 0), NAN), SCALE, "nan at [1, 0, 0, 0]"),
    ("modelopt fp8 blocks", put(SCALE, (0, 0, 1, 0), 0.0), SCALE, "0.0 at [0, 0, 1, 0]"),
    ("fp8 tensors", swap(SCALE, lambda s: s * NAN), SCALE, "nan"),
    ("compressed fp8 channels", swap(SCALE, lambda s: s[:64]), SCALE, "[64, 1]"),
    (CT4, drop(SCALE), SCALE, "missing"),
    (CT4, drop(WORDS), WORDS, "missing"),
    (CT4, drop(Q + "weight_shape"), Q + "weight_shape", "missing"),
    (CT4, swap(WORDS, lambda w: w[:, :-1]), WORDS, "[192, 24]"),
    (CT4, swap(WORDS, lambda w: w.long()), WORDS, "int64"),
    (CT4, swap(Q + "weight_shape", lambda _: torch.tensor([192, 0])), Q + "weight_shape", "[192, 0]"),
    (CT4, swap(Q + "weight_shape", lambda _: torch.tensor([192, 1 << 40])), Q + "weight_shape", "two sizes"),
    (CT4, put(SCALE, (191, 2), NAN), SCALE, "nan at [191, 2]"),
    (CT4Z, drop(ZERO), ZERO, "missing"),
    (CT4Z, swap(ZERO, lambda z: z[:-1]), ZERO, "[24, 6]"),
    (ORDER, put(Q + "weight_g_idx", (5,), 3), Q + "weight_g_idx", "groups from 0 to 2"),
    (ORDER, put(Q + "weight_g_idx", (5,), -1), Q + "weight_g_idx", "groups from 0 to 2"),
    (ORDER, swap(Q + "weight_g_idx", torch.zeros_like), Q + "weight_g_idx", "groups of 64"),
    (ORDER, drop(Q + "weight_g_idx"), Q + "weight_g_idx", "missing"),
    ("gptq v2 in an order", drop(Q + "g_idx"), Q + "g_idx", "missing"),
    ("compressed int8 with zeros", drop(ZERO), ZERO, "missing"),
    ("compressed int8", put(SCALE, (3, 0), 0.0), SCALE, "0.0 at [3, 0]"),
    ("compressed nvfp4", put(SCALE, (2, 1), 0x7F), SCALE, "nan at [2, 1]"),
    ("compressed nvfp4", put(Q + "weight_global_scale", (0,), 0.0), Q + "weight_global_scale", "0.0 at [0]"),
    ("compressed nvfp4", drop(Q + "weight_global_scale"), Q + "weight_global_scale", "missing"),
    ("compressed mxfp4", put(SCALE, (4, 1), 255), SCALE, "nan at [4, 1]"),
    ("modelopt nvfp4", swap(SCALE, lambda s: s.view(torch.uint8)), SCALE, "float8_e4m3fn"),
    ("mxfp4", swap(Q + "weight_blocks", lambda w: w[..., :8]), Q + "weight_blocks", "whole groups of 32"),
    ("gptq", drop(Q + "qzeros"), Q + "qzeros", "missing"),
    ("gptq", drop(Q + "qweight"), Q + "qweight", "missing"),
    ("gptq", swap(Q + "scales", lambda s: s[:-1]), Q + "scales", "[3, 192]"),
    ("gptq", put(Q + "g_idx", (0,), 9), Q + "g_idx", "groups from 0 to 2"),
    ("gptq", put(Q + "qzeros", (0, 0), 0x12345678), Q + "qzeros", "8 everywhere"),
    ("gptq", swap(Q + "qweight", lambda w: w[:, :-8]), Q + "scales", "[3, 184]"),
    ("gptq v2 in an order", put(Q + "scales", (1, 1), INF), Q + "scales", "inf at [1, 1]"),
    ("awq", drop(Q + "scales"), Q + "scales", "missing"),
    ("awq", swap(Q + "qzeros", lambda z: z[:, :-1]), Q + "qzeros", "[3, 24]"),
    ("bitsandbytes nf4", drop(Q + "weight.quant_map"), Q + "weight.quant_map", "missing"),
    ("bitsandbytes nf4", drop(Q + "weight.nested_absmax"), Q + "weight.absmax", "float32"),
    ("bitsandbytes nf4", put(Q + "weight.nested_absmax", (0,), NAN), Q + "weight.nested_absmax", "nan"),
    ("bitsandbytes nf4", drop(Q + "weight.quant_state.bitsandbytes__nf4"), Q + "weight.quant_state", "missing"),
    ("bitsandbytes nf4", swap(Q + "weight", lambda w: w[:-1]), Q + "weight", "[18432, 1]"),
    ("bitsandbytes int8", drop(Q + "SCB"), Q + "SCB", "missing"),
    # Negative scales, which no tool writes for floats.
    (
        "fp8 blocks in bfloat16",
        put(INVERSE, (0, 1), -1.0),
        INVERSE,
        "-1.0 at [0, 1]; wanted: finite scales, above zero",
    ),
    ("fp8 tensors", swap(SCALE, torch.neg), SCALE, "above zero"),
    ("compressed nvfp4", put(SCALE, (2, 1), 0xB8), SCALE, "-1.0 at [2, 1]; wanted: finite scales, not negative"),
    ("compressed nvfp4", put(Q + "weight_global_scale", (0,), -2.0), Q + "weight_global_scale", "above zero"),
    ("bitsandbytes fp4", put(Q + "weight.absmax", (0,), -1.0), Q + "weight.absmax", "not negative"),
    ("bitsandbytes int8", put(Q + "SCB", (1,), -3.0), Q + "SCB", "-3.0 at [1]"),
    ("fp8 blocks with exponents", put(INVERSE, (0, 1), 255), INVERSE, "nan at [0, 1]"),
    ("mxfp4", put(Q + "weight_scales", (0, 0), 255), Q + "weight_scales", "nan at [0, 0]"),
    # Codes of fewer inputs or outputs than the scales beside them are for.
    ("compressed nvfp4", swap(WORDS, lambda w: w[:, :-8]), SCALE, f"[192, 11] beside {WORDS} [192, 88]"),
    ("compressed mxfp4", swap(WORDS, lambda w: w[:, :-16]), SCALE, f"[192, 5] beside {WORDS} [192, 80]"),
    ("gptq", swap(Q + "qweight", lambda w: w[:-1]), Q + "g_idx", f"[184] beside {Q}qweight [23, 192]"),
    ("awq", swap(Q + "qweight", lambda w: w[:, :-1]), Q + "qzeros", f"[3, 23] beside {Q}qweight [192, 23]"),
    ("compressed int8", swap(Q + "weight", lambda w: w[:, :-1]), Q + "weight", "the shape [192, 192]"),
    # What a module has twice.
    (CT4, lambda t: t.update({Q + "weight": torch.zeros(192, 192)}), Q + "weight", "left over"),
    (CT4, lambda t: t.update({ZERO: torch.zeros(3, 3, dtype=torch.int32)}), ZERO, "[24, 3]"),
    (CT4, lambda t: t.update({Q + "weight_g_idx": torch.zeros(7, dtype=torch.int32)}), Q + "weight_g_idx", "[192]"),
    # An embedding in codes, of which the config says nothing.
    ("gptq", swap(EMBEDDING, lambda e: e.to(torch.int8)), EMBEDDING, "I8"),
    ("fp8 tensors", swap(EMBEDDING, lambda e: e.to(torch.float8_e4m3fn)), "model.embed_tokens.weight_scale", "missing"),
    (CT4, swap(EMBEDDING, lambda e: e.to(torch.int8)), EMBEDDING, "int8"),
    # Scales of an 8-bit cache.
    ("compressed fp8 channels", lambda t: t.update({CACHE: torch.tensor(NAN)}), CACHE, "nan; wanted: a positive"),
    ("compressed fp8 channels", lambda t: t.update({CACHE: torch.tensor(-1.0)}), CACHE, "-1.0; wanted: a positive"),
    ("compressed fp8 channels", lambda t: t.update({CACHE: torch.ones(2)}), CACHE, "one number"),
    # Tensors of one product that do not agree.
    ("fp8 blocks", plain_q, K + "weight", "which is plain"),
    ("gptq", plain_q, K + "weight", "which is plain"),
]


@pytest.mark.parametrize(("case", "change", "field", "told"), TENSORS)
def test_a_damaged_tensor_is_refused_by_its_name(
    case: str, change: Callable[[Tensors], object], field: str, told: str, tmp_path: Path
) -> None:
    write_checkpoint(tmp_path, CASES[case])
    change_tensors(tmp_path, change)
    error = refused(tmp_path)
    assert field in (error.field or "") and told in str(error)


def test_tensors_of_one_product_with_other_groups_are_refused(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, CASES["gptq with rules"])
    late = "model.layers.1.self_attn."

    def halve_groups(tensors: Tensors) -> None:
        for name in ("scales", "qzeros"):
            tensors[f"{late}k_proj.{name}"] = tensors[f"{late}k_proj.{name}"].repeat(2, 1)
        tensors[f"{late}k_proj.g_idx"] = (torch.arange(192) // 32).int()

    change_config(tmp_path, lambda config: config["dynamic"].update({r"+:.*1\.self_attn\.k_proj": {"group_size": 32}}))
    change_tensors(tmp_path, halve_groups)
    error = refused(tmp_path)
    assert error.field == f"{late}k_proj.weight" and "int4-g32" in str(error)
    assert f"as {late}q_proj.weight, which is int4-g64" in str(error)


def test_a_quantised_head_that_is_tied_to_a_plain_embedding_is_refused(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, CASES["bitsandbytes int8"], tie_word_embeddings=True)
    assert refused(tmp_path).field == "lm_head.weight"
    write_checkpoint(tmp_path, CASES["gptq with rules"], tie_word_embeddings=True)
    error = refused(tmp_path)
    assert (error.field or "").startswith("lm_head.") and "tie_word_embeddings is true" in str(error)


@pytest.mark.parametrize("kept", [-1, 5000, 8])
def test_a_truncated_file_is_refused(kept: int, tmp_path: Path) -> None:
    write_checkpoint(tmp_path, CASES["gptq"])
    path = tmp_path / "model.safetensors"
    path.write_bytes(path.read_bytes()[:kept])
    assert "model.safetensors" in (told := str(refused(tmp_path))) and "truncated?" in told


@pytest.mark.parametrize(("case", "tensor"), [("gptq", "qweight"), ("fp8 blocks", "weight"), (CT4, "weight_packed")])
def test_codes_without_a_config_that_describes_them_are_refused(case: str, tensor: str, tmp_path: Path) -> None:
    write_checkpoint(tmp_path, CASES[case])
    path = tmp_path / "config.json"
    config = json.loads(path.read_text())
    del config["quantization_config"]
    path.write_text(json.dumps(config))
    error = refused(tmp_path)
    assert error.field == Q + tensor and "since there is no quantization_config" in str(error)


def test_scales_of_integers_may_be_negative_as_auto_rounds_are(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, CASES["auto-round mixture"])
    spec = from_hf(read_hf_config(tmp_path))
    before = load_weights(tmp_path, spec, dtype=torch.float32, device="cpu").layers[1].feed.matrices["down"]
    change_tensors(tmp_path, swap(DOWN + "scales", torch.neg))
    after = load_weights(tmp_path, spec, dtype=torch.float32, device="cpu").layers[1].feed.matrices["down"]
    assert torch.equal(after.parts["values"], -before.parts["values"])


def test_a_code_for_nan_is_refused_when_it_is_read(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, CASES["fp8 blocks"])
    change_tensors(tmp_path, put(DOWN + "weight", (100, 100), 0xFF))
    error = refused(tmp_path, lambda shape, dtype: torch.empty(shape, dtype=dtype))
    assert error.field == DOWN + "weight" and "not finite" in str(error)


def test_a_refusal_that_is_kept_keeps_no_weights(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, CASES["fp8 blocks"])
    change_tensors(tmp_path, put(DOWN + "weight", (100, 100), 0xFF))

    def tensors() -> set[int]:
        gc.collect()
        return {id(each) for each in gc.get_objects() if type(each) is Tensor}

    before = tensors()
    with pytest.raises(ModelRejected, match="not finite") as caught:
        open_engine(EngineConfig(model=tmp_path, device="cpu", kv_memory="1MiB"))
    assert caught.value.field == DOWN + "weight"
    new = tensors() - before
    assert not [each.shape for each in gc.get_objects() if id(each) in new and each.numel() > 1000]


def test_an_expression_cannot_hold_up_the_opening(tmp_path: Path) -> None:
    """Python's own engine would try some 2^30 ways to match this expression."""
    write_checkpoint(tmp_path, CASES[CT4])
    change_config(tmp_path, lambda config: config["ignore"].append(r"re:(([a-z0-9_.]+)+)+\d!"))
    spec = from_hf(read_hf_config(tmp_path))
    load_weights(tmp_path, spec, dtype=torch.bfloat16, device="cpu")
